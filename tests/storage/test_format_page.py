"""`docs/storage-format.md` is enough: a reader written from that page alone, which uses nothing of ours."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import xxhash

from tests.storage.faults import FaultyFileSystem
from tests.storage.logs import TOPIC_ID, TS_MS, commit, open_writer, topic_create
from tests.storage.segments import Record, make_segment
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import FrameType, encode, lay_out, stamp
from topics.storage.segment_deletes import mark_deleted
from topics.storage.snapshot import save_snapshot

Frames = list[tuple[int, int, int, int, int, bytes, bytes, bytes]]
"""type, flags, topic_id, seq, ts, node, tag, payload"""


def read_log_frames(content: bytes) -> Frames:
    frames: Frames = []
    at = 0
    while at + 46 <= len(content):
        frame_len, type_, flags, topic_id, seq, ts, node_len, tag_len, data_len = struct.unpack_from(
            "<IBBQQQHHI", content, at
        )
        if not frame_len:
            break
        end = at + 4 + frame_len
        assert frame_len == 34 + node_len + tag_len + data_len + 8
        assert xxhash.xxh3_64_intdigest(content[at + 4 : end - 8]) == int.from_bytes(content[end - 8 : end], "little")
        tag_at = at + 38 + node_len
        payload_at = tag_at + tag_len
        node, tag, payload = content[at + 38 : tag_at], content[tag_at:payload_at], content[payload_at : end - 8]
        frames.append((type_, flags, topic_id, seq, ts, node, tag, payload))
        at = end
    return frames


def read_log(directory: Path) -> Frames:
    """The frames of writes, without those that make up the files."""
    frames: Frames = []
    names = sorted(path.name for path in directory.glob("wal-*.log"))
    for file_no, name in enumerate(names, 1):
        found = read_log_frames((directory / name).read_bytes())
        start = msgspec.msgpack.decode(found[0][7])
        assert found[0][0] == 32
        assert (start["version"], start["file_no"], name) == (2, file_no, f"wal-{file_no:020d}.log")
        frames += [frame for frame in found if frame[0] not in (32, 33, 34)]
        if (directory / "CURRENT").read_text() == name + "\n":
            break
        assert found[-1][0] == 33
        assert found[-1][2] == file_no
    return frames


def read_segment(stem: Path) -> dict[int, tuple[int, bytes, bytes, bytes]]:
    """seq → ts, node, tag, payload of what lives."""
    data, idx = stem.with_suffix(".data").read_bytes(), stem.with_suffix(".idx").read_bytes()
    first_seq = int(stem.name.removeprefix("seg-"))
    found = {}
    for at in range(0, len(idx), 20):
        offset, length, ts, flags = struct.unpack_from("<IIQB3x", idx, at)
        frame = data[offset : offset + length]
        if flags & (2 | 32) or frame[-1] == 0xD5:
            continue
        frame_len, _, seq, frame_ts, node_len, tag_len, data_len = struct.unpack_from("<IBQQHHI", frame)
        assert (frame_len, seq, frame_ts) == (length - 4, first_seq + at // 20, ts)
        assert frame_len == 25 + node_len + tag_len + data_len + 9
        assert xxhash.xxh3_64_intdigest(frame[4:-9]) == int.from_bytes(frame[-9:-1], "little")
        tag_at, payload_at = 29 + node_len, 29 + node_len + tag_len
        found[seq] = (ts, frame[29:tag_at], frame[tag_at:payload_at], frame[payload_at:-9])
    return found


def read_tags(path: Path) -> dict[bytes, list[int]]:
    content = path.read_bytes()
    magic, version, _, first_seq, tag_count, seq_count, text_len, topic, checksum = struct.unpack_from(
        "<8sIIQIIIIQ", content
    )
    topic_id = int(path.parent.name, 16).to_bytes(8, "little")
    assert topic == xxhash.xxh3_64_intdigest(topic_id) % 2**32
    assert (magic, version) == (b"topicTAG", 1)
    assert checksum == xxhash.xxh3_64_intdigest(content[:40] + content[48:])
    words = struct.unpack_from(f"<{2 * tag_count + seq_count}I", content, 48)
    text = content[len(content) - text_len :]
    found: dict[bytes, list[int]] = {}
    text_start = list_start = 0
    for text_end, list_end in zip(words[:tag_count], words[tag_count : 2 * tag_count], strict=True):
        offsets = words[2 * tag_count :][list_start:list_end]
        found[text[text_start:text_end]] = [first_seq + offset for offset in offsets]
        text_start, list_start = text_end, list_end
    return found


def test_the_log(tmp_path: Path) -> None:
    writer = open_writer(FaultyFileSystem(), str(tmp_path), file_bytes=512)
    commit(writer, topic_create(TOPIC_ID, "orders"))
    expected = []
    for seq in range(1, 20, 2):
        laid_out = lay_out([(b"n", "tä".encode(), b"1", b'{"k":"v"}'), (b"", b"", b'"two"', b"")])
        stamp(laid_out.buffer, laid_out.offset_len, TOPIC_ID, seq, TS_MS, 4)
        commit(writer, bytes(laid_out.buffer))
        payload = b'"data":1,"meta":{"k":"v"}'
        expected.append((1, 1 | 2 | 4 | 8 | 16, TOPIC_ID, seq, TS_MS, b"n", "tä".encode(), payload))
        expected.append((1, 4, TOPIC_ID, seq + 1, TS_MS, b"", b"", b'"data":"two"'))
    commit(writer, encode(FrameType.EVICT_WATERMARK, 0, TOPIC_ID, 3, TS_MS, b"", b"", b"\x81\xa6reason\x01"))
    writer.close()
    create, *appends, evict = read_log(tmp_path)
    assert len(list(tmp_path.glob("*.log"))) > 3
    assert (create[0], create[2]) == (2, TOPIC_ID)
    assert msgspec.msgpack.decode(create[7])["name"] == "orders"
    assert appends == expected
    assert evict[:4] == (7, 0, TOPIC_ID, 3)
    assert msgspec.msgpack.decode(evict[7]) == {"reason": 1}


def test_a_segment_its_tags_and_a_snapshot(tmp_path: Path) -> None:
    records = [Record(b'"a"', b"n", b"t", b'{"k":1}'), Record(b"2"), Record(b"3", tag=b"u"), Record(b"4", tag=b"t")]
    make_segment(FaultyFileSystem(), str(tmp_path), records, first_seq=100)
    stem = tmp_path / "topics" / f"{TOPIC_ID:016x}" / "seg-00000000000000000100"
    mark_deleted(OsFileSystem(), str(stem.parent), 100, [102])
    assert read_segment(stem) == {
        seq: (TS_MS + seq, record.node, record.tag, record.payload)
        for seq, record in enumerate(records, 100)
        if seq != 102
    }
    assert read_tags(stem.with_suffix(".tags")) == {b"t": [100, 103], b"u": [102]}
    save_snapshot(OsFileSystem(), str(tmp_path), msgspec.msgpack.encode({"a": 1}))
    content = (tmp_path / "meta" / "snapshot.00000000000000000001.bin").read_bytes()
    magic, version, body_len, checksum = struct.unpack_from("<8sI4xQQ", content)
    assert (magic, version, body_len) == (b"topicSNP", 1, len(content) - 32)
    assert checksum == xxhash.xxh3_64_intdigest(content[:24] + content[32:])
    assert msgspec.msgpack.decode(content[32:]) == {"a": 1}
