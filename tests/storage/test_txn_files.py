"""Stage and sink files: what goes in comes out, and nothing else ever does."""

from __future__ import annotations

from io import BytesIO

import pytest

from tests.cases import case
from topics.storage.frame import lay_out
from topics.storage.txn_files import (
    SINK_HEAD_LEN,
    Sink,
    TxnFileDamagedError,
    belongs_to_txn,
    decode_sink,
    decode_sink_head,
    decode_stage,
    encode_sink,
    encode_stage,
    is_sink_name,
    is_stage_id,
    new_stage_id,
    read_stage_head,
    sink_name,
    stage_name,
    stage_of_name,
    topic_id_of,
)

RECORDS = lay_out([(b"node", b"tag", b'{"a":1}', b'{"k":"v"}'), (b"", b"", b"2", b"")])
STAGE = encode_stage("orders", RECORDS, 0x1A2B)
SINK = encode_sink(Sink("sink", 7, [("stage", "orders"), ("other", "audit")]))


def test_a_stage_holds_its_frames_as_they_were_laid_out() -> None:
    stage = decode_stage(STAGE)
    assert (stage.topic, stage.offset_len, stage.record_flags) == ("orders", RECORDS.offset_len, RECORDS.flags)
    assert stage.frames == RECORDS.buffer
    assert read_stage_head(BytesIO(STAGE)) == ("orders", 2, len(RECORDS.buffer), 0x1A2B)
    assert topic_id_of(stage.frames) == 0x1A2B


def test_a_sink_holds_its_batch_and_stages() -> None:
    assert decode_sink(SINK, sink_name("sink")) == Sink("sink", 7, [("stage", "orders"), ("other", "audit")])
    assert decode_sink_head(SINK[:SINK_HEAD_LEN]) == (7, 2)


def test_every_changed_or_missing_byte_of_a_stage_is_found() -> None:
    for at in range(len(STAGE)):
        for damaged in (STAGE[:at] + bytes([STAGE[at] ^ 0x10]) + STAGE[at + 1 :], STAGE[:at]):
            with case(at, damaged), pytest.raises(TxnFileDamagedError):
                decode_stage(damaged)


def test_a_head_that_is_damaged_is_found_as_far_as_it_can_be() -> None:
    at = STAGE.index(b"orders")
    for damaged in (STAGE[:at] + b"\xff" + STAGE[at + 1 :], STAGE[: at + 5], STAGE[: at + 6], STAGE[:3]):
        with case(damaged), pytest.raises(TxnFileDamagedError):
            read_stage_head(BytesIO(damaged))


def test_every_changed_or_missing_byte_of_a_sink_is_found() -> None:
    for at in range(len(SINK)):
        for damaged in (SINK[:at] + bytes([SINK[at] ^ 0x10]) + SINK[at + 1 :], SINK[:at]):
            with case(at, damaged), pytest.raises(TxnFileDamagedError):
                decode_sink(damaged, sink_name("sink"))


def test_the_file_of_another_sink_is_found() -> None:
    with pytest.raises(TxnFileDamagedError, match=f"it is of sink 'sink', whose file is {sink_name('sink')}"):
        decode_sink(SINK, sink_name("other"))


def test_names_of_stages_and_sinks() -> None:
    stage = new_stage_id("orders", "txn")
    assert is_stage_id(stage)
    assert stage_of_name(stage_name(stage)) == stage
    assert stage_of_name(stage_name(stage) + ".tmp") is None
    assert not is_stage_id("../" + stage[3:])
    assert belongs_to_txn(stage, "orders", "txn")
    assert not belongs_to_txn(stage, "orders", "txn2")
    assert not belongs_to_txn(stage, "orders\x00", "txn")
    assert new_stage_id("orders", "txn") != stage
    assert is_sink_name(sink_name("any"))
    assert not is_sink_name(sink_name("any") + ".tmp")
