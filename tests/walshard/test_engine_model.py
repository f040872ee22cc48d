"""The whole engine but HTTP against a model of dictionaries: a shard and the compactor, real files, kills and restarts.

What must hold after every step, for each topic: seqs strictly increase; each record that was acknowledged is delivered
as it was written, or was deleted on request (silently), or lies below evict_floor (a tombstone covers it);
evict_floor <= earliest_seq; nothing is delivered that was not written; evict_floor never goes back, and a delete moves
it only over what had been lost from RAM, once nothing that lives is before that. Pages are read as a frontend reads
them, and have a tombstone exactly where one is due, also for what has expired and the shard has not heard of.
"""

from __future__ import annotations

import asyncio
import copy
import os
import shutil
import tempfile
from array import array
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.frontend.hosting import served
from tests.storage.faults import FaultyFileSystem
from tests.walshard.compaction import Compaction
from tests.walshard.rig import Rig
from topics.core import tags
from topics.core.config import TopicConfig
from topics.core.errors import TopicsError
from topics.core.location import LOCATION_DELETED, LOCATION_LOST
from topics.frontend.reads.cold import ColdMissError, ColdTier
from topics.frontend.reads.files import LogFiles
from topics.frontend.reads.reading import RecordPage, TopicReader
from topics.frontend.reads.records import PageOptions
from topics.frontend.shards.arenas import Arenas
from topics.shm.topic_messages import DeleteRecords, DeleteTopic, Expire, PutTopic
from topics.storage import kill_points, layout
from topics.storage.filesystem import OsFileSystem
from topics.storage.frame import OVERHEAD_LEN
from topics.storage.segment_store import LocalStore
from topics.storage.verify import verify
from topics.walshard.handlers import relogging
from topics.walshard.hosted import tag_search

NAMES = ("a", "b")
TAGS = (b"", b"x", b"x:1", b"y")
CLASSES = ("disk", "disk", "fsync", "memory", "ephemeral")
WRITES = st.lists(st.tuples(st.integers(1, 9), st.sampled_from(TAGS)), min_size=1, max_size=4)
MATCHES: st.SearchStrategy[tuple[Literal["eq", "glob"], bytes]] = st.tuples(
    st.sampled_from(["eq", "glob"]), st.sampled_from(TAGS)
)
BEFORE = st.none() | st.integers(0, 15) | st.integers(0, 60)
COLD_TIMEOUT_MS = 5000
STEPS = int(os.environ.get("TOPICS_MODEL_STEPS", "40"))
EXAMPLES = int(os.environ.get("TOPICS_MODEL_EXAMPLES", "40"))


class Model:
    """One topic as it must be."""

    def __init__(self, config: TopicConfig) -> None:
        self.config = config
        self.head_seq = 0
        self.live: dict[int, tuple[bytes, bytes, int, bool]] = {}
        """seq → data, tag, ts, in RAM"""
        self.reasons: set[str] = set()
        """Reasons for which anything was evicted."""
        self.evict_floor = 1
        self.ever_in_ram: set[int] = set()
        self.lost: set[int] = set()
        """Gone with RAM, as the engine says: behind records that live."""

    def append(self, first_seq: int, data: list[bytes], tag: bytes, ts: int) -> None:
        assert first_seq > self.head_seq, "no seq is given twice"
        in_ram = self.config.durability == "ephemeral"
        for seq, piece in enumerate(data, first_seq):
            self.live[seq] = (piece, tag, ts, in_ram)
            if in_ram:
                self.ever_in_ram.add(seq)
        self.head_seq = first_seq + len(data) - 1
        self.evict_over_cap()

    def room_for(self, data: list[bytes], tag: bytes, ts: int) -> str:
        """The code with which a write is refused, if it is."""
        config = self.config
        records, size_bytes = len(data), sum(_size_bytes(piece, tag) for piece in data)
        if self._is_over_cap(records, size_bytes):
            self.expire(ts)  # what has expired is not what a cap takes, or refuses for
        if config.discard == "old" or not self._is_over_cap(records, size_bytes):
            return ""
        fits = records <= (config.cap_records or records) and size_bytes <= (config.cap_bytes or size_bytes)
        return "topic_full" if fits else "record_too_large"

    def _is_over_cap(self, more_records: int = 0, more_bytes: int = 0) -> bool:
        cap_records, cap_bytes = self.config.cap_records, self.config.cap_bytes
        live_bytes = sum(_size_bytes(data, tag) for data, tag, *_ in self.live.values())
        over_records = bool(cap_records) and len(self.live) + more_records > cap_records
        return over_records or (bool(cap_bytes) and live_bytes + more_bytes > cap_bytes)

    def evict_over_cap(self) -> None:
        while self.config.discard == "old" and self.live and self._is_over_cap():
            self._evict(min(self.live), "cap")
        self.lay_open_lost()

    def expire(self, now_ms: int) -> None:
        ttl_ms = self.config.ttl_ms
        for seq, (_, _, ts, _) in sorted(self.live.items()):
            if not ttl_ms or now_ms - ts <= ttl_ms:
                break
            self._evict(seq, "ttl")
        self.lay_open_lost()

    def lay_open_lost(self) -> None:
        """Note the loss of records before all live ones."""
        front = min(self.live, default=self.head_seq + 1)
        self.evict_floor = max(self.evict_floor, *(seq + 1 for seq in self.lost if seq < front), 1)
        self.lost = {seq for seq in self.lost if seq > front}

    def delete(self, before_seq: int | None, op: str | None, tag: bytes, first_seq: int, last_seq: int) -> int:
        gone = [
            seq
            for seq, (_, has, _, _) in self.live.items()
            if first_seq <= seq <= last_seq
            and (before_seq is None or seq < before_seq)
            and (op is None or (has == tag if op == "eq" else has.startswith(tag)))
            and (op is None or has)
        ]
        for seq in gone:
            del self.live[seq]
        if op is None:
            assert before_seq is not None
            self.lost = {seq for seq in self.lost if seq >= before_seq}
        self.lay_open_lost()
        return len(gone)

    def at(self, now_ms: int) -> Model:
        """Return the model as readers see it then."""
        seen = copy.copy(self)
        seen.live, seen.lost, seen.reasons = dict(self.live), set(self.lost), set(self.reasons)
        seen.expire(now_ms)
        return seen

    @property
    def earliest_seq(self) -> int:
        return min(self.live, default=self.head_seq + 1)

    def _evict(self, seq: int, reason: str) -> None:
        del self.live[seq]
        self.evict_floor = seq + 1
        self.reasons.add(reason)


def _size_bytes(data: bytes, tag: bytes) -> int:
    """Return the bytes of the frame in the log."""
    return OVERHEAD_LEN + len(tag) + len(b'"data":') + len(data)


class Frontend:
    """A reader of the shard's topics, for as long as a service lives."""

    def __init__(self, rig: Rig) -> None:
        data_dir, cold_dir = rig.settings.data_dir, rig.settings.cold_dir
        assert cold_dir is not None
        self._runner = asyncio.Runner()  # one loop: reads in advance go on from page to page
        self._arenas = Arenas(rig.shared)
        files = LogFiles(data_dir, rig.shared.ram_dir, 1, maps_max=2)
        store = LocalStore(OsFileSystem(), layout.topics_dir(cold_dir))
        self.reader = TopicReader(self._arenas, files, 1, rig.clock, ColdTier(store, rig.clock, COLD_TIMEOUT_MS))

    def page(self, name: str, from_seq: int, limit: int) -> RecordPage:
        """Return a page, with whatever waiting it takes."""
        return self._runner.run(self._page(name, from_seq, limit))

    async def _page(self, name: str, from_seq: int, limit: int) -> RecordPage:
        reader, options = self.reader, PageOptions(limit, 1 << 20)
        while True:
            try:
                return reader.read_page(reader.get(name), from_seq, options)
            except ColdMissError as miss:
                await reader.fetch(miss)

    def close(self) -> None:
        self._runner.close()
        self._arenas.close()


class Engine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.mkdtemp(prefix="topics-model-")
        self.cold_dir = self.directory + "-cold"
        self.rig = Rig(
            self.directory,
            FaultyFileSystem(),
            segment_max_events="6",
            segment_rewrite_dead_ratio="0.3",
            cold_dir=self.cold_dir,
            hot_retain_segments="1",
        )
        self.compaction = Compaction(self.rig)
        self.frontend = Frontend(self.rig)
        self.models: dict[str, Model] = {}
        self.rests: list[tuple[DeleteRecords, int]] = []
        self.written = 0

    def teardown(self) -> None:
        self.rig.shard.close()
        self.frontend.close()
        self.rig.close()
        report = verify(self.directory, lambda *_: None, self.cold_dir)
        shutil.rmtree(self.directory)
        shutil.rmtree(self.cold_dir, ignore_errors=True)
        assert report.damage == []

    @initialize(caps=st.lists(st.sampled_from([0, 0, 5, 12]), min_size=2, max_size=2), ttl=st.sampled_from([0, 50]))
    def begin(self, caps: list[int], ttl: int) -> None:
        for name, cap in zip(NAMES, caps, strict=True):
            self.configure(name, cap, 0, "old", ttl, "disk")

    # -- what clients do

    @rule(
        name=st.sampled_from(NAMES),
        cap=st.sampled_from([0, 0, 3, 12]),
        cap_bytes=st.sampled_from([0, 0, 300, 1000]),
        discard=st.sampled_from(["old", "reject"]),
        ttl=st.sampled_from([0, 50]),
        durability=st.sampled_from(CLASSES),
    )
    def configure(
        self,
        name: str,
        cap: int,
        cap_bytes: int,
        discard: Literal["old", "reject"],
        ttl: int,
        durability: Literal["disk", "fsync", "memory", "ephemeral"],
    ) -> None:
        config = TopicConfig(cap_records=cap, cap_bytes=cap_bytes, discard=discard, ttl_ms=ttl, durability=durability)
        self.rig.call(PutTopic(name, config, True))
        model = self.models.setdefault(name, Model(config))
        if config != model.config:  # a longer ttl brings nothing back
            model.expire(self.rig.clock.ms)
        if durability != "ephemeral" and model.config.durability == "ephemeral":
            model.live = {seq: (data, tag, ts, False) for seq, (data, tag, ts, _) in model.live.items()}
        model.config = config
        model.evict_over_cap()

    @precondition(lambda self: any(model.config.durability == "ephemeral" for model in self.models.values()))
    @rule(
        cap=st.sampled_from([0, 0, 3, 12]),
        turns=st.integers(1, 3),
        writes=WRITES,
        match=st.none() | MATCHES,
        cuts=st.booleans(),
        end=st.sampled_from(["shard", "service", "none"]),
    )
    def become_durable(
        self,
        cap: int,
        turns: int,
        writes: list[tuple[int, bytes]],
        match: tuple[Literal["eq", "glob"], bytes] | None,
        cuts: bool,
        end: str,
    ) -> None:
        """A change of class stops after some turns, with whatever others do in between. Until the last one the topic is
        as it was.
        """
        name = next(name for name in self.models if self.models[name].config.durability == "ephemeral")
        model, config = self.models[name], TopicConfig(cap_records=cap)
        call: PutTopic | None = PutTopic(name, config, True)
        for _ in range(turns):
            assert call is not None
            model.expire(self.rig.clock.ms)
            call = self.rig.answer(self.rig.post_call(call)).rest
            if call is None:
                model.live = {seq: (data, tag, ts, False) for seq, (data, tag, ts, _) in model.live.items()}
                model.config = config
                model.evict_over_cap()
                break
            self.everything_is_as_it_must_be()
            if match is not None:
                self.delete(name, None, match)
            self.append(name, writes[:1])
            if cuts:
                self.cut()
        if end == "shard":
            self.shard_dies()
        elif end == "service":
            self.service_restarts(cleanly=False)

    @rule(name=st.sampled_from(NAMES), writes=WRITES)
    def append(self, name: str, writes: list[tuple[int, bytes]]) -> None:
        for count, tag in writes:
            self._append(name, count, tag)

    @rule(name=st.sampled_from(NAMES), writes=WRITES, match=MATCHES)
    def append_and_delete(
        self, name: str, writes: list[tuple[int, bytes]], match: tuple[Literal["eq", "glob"], bytes]
    ) -> None:
        """Delete records, mostly such that are still in the log."""
        self.append(name, writes)
        self.delete(name, None, match)

    def _append(self, name: str, count: int, tag: bytes) -> None:
        data = [b"%d" % (self.written + number) for number in range(count)]
        self.written += count
        config = self.models[name].config if name in self.models else TopicConfig()
        model = self.models.setdefault(name, Model(config))
        refusal = model.room_for(data, tag, self.rig.clock.ms)
        if refusal:
            with pytest.raises(TopicsError) as refused:
                self.rig.append(name, *data, tag=tag)
            assert refused.value.code == refusal
            return
        reply = self.rig.append(name, *data, tag=tag)
        model.append(reply.first_seq, data, tag, self.rig.clock.ms)

    @rule(name=st.sampled_from(NAMES), before=BEFORE, match=st.none() | MATCHES)
    def delete(self, name: str, before: int | None, match: tuple[Literal["eq", "glob"], bytes] | None) -> None:
        if name not in self.models or (before is None and match is None):
            return
        op, tag = match or (None, b"")
        self._delete(DeleteRecords(name, before, op, tag), self.models[name].head_seq)

    @precondition(lambda self: bool(self.rests))
    @rule()
    def go_on_deleting(self) -> None:
        """Do what a delete has left to later turns, whatever happened since."""
        call, last_seq = self.rests.pop()
        hosted = self.rig.parts.catalog.find(call.name)
        if hosted is not None and hosted.topic.id == call.topic_id:
            self._delete(call, last_seq)
        else:
            with pytest.raises(TopicsError, match="does not exist"):
                self.rig.call(call)

    def _delete(self, call: DeleteRecords, last_seq: int) -> None:
        """It is point-in-time: `last_seq` was the head when it began."""
        model = self.models[call.name]
        model.expire(self.rig.clock.ms)
        reply = self.rig.call(call)
        done_seq = last_seq
        if reply.rest is not None:
            self.rests.append((reply.rest, last_seq))
            done_seq = reply.rest.from_seq - 1
        assert reply.deleted == model.delete(call.before_seq, call.op, call.pattern, call.from_seq, done_seq)
        assert reply.earliest_seq == min(model.live, default=model.head_seq + 1)

    @rule(name=st.sampled_from(NAMES), sure=st.integers(0, 3))
    def delete_topic(self, name: str, sure: int) -> None:
        if sure:  # or there would seldom be much in any
            return
        self.rig.call(DeleteTopic(name, False))
        self.models.pop(name, None)

    @rule(ms=st.sampled_from([1, 1, 20, 20, 51, 2000]))
    def time_passes(self, ms: int) -> None:
        self.rig.clock.ms += ms

    @rule(name=st.sampled_from(NAMES))
    def expire(self, name: str) -> None:
        self.rig.call(Expire(name))
        if name in self.models:
            self.models[name].expire(self.rig.clock.ms)

    # -- what the engine does

    @rule()
    def cut(self) -> None:
        self.compaction.cut()

    @rule(
        name=st.sampled_from(NAMES),
        before=BEFORE,
        match=st.none() | MATCHES,
        count=st.integers(0, 9),
        dies=st.booleans(),
    )
    def cut_beside(
        self, name: str, before: int | None, match: tuple[Literal["eq", "glob"], bytes] | None, count: int, dies: bool
    ) -> None:
        """Clients go on when the compactor has read the log: its snapshot is of before, its segments are of after, and
        perhaps the next start reads both.
        """

        def act() -> None:
            kill_points.arm(None, lambda: None)
            self.delete(name, before, match)
            if count:
                self._append(name, count, b"x")

        kill_points.arm("checkpoint.followed", act)
        self.compaction.cut()
        kill_points.arm(None, lambda: None)
        if dies:
            self.rig.boot()

    @rule()
    def upkeep(self) -> None:
        before_ms = self.rig.clock.ms
        self.compaction.upkeep()
        self.rig.clock.ms = before_ms

    @rule()
    def sweep(self) -> None:
        self.rig.shard.sweep()
        self.rig.shard.sync_in_background()
        for model in self.models.values():
            model.expire(self.rig.clock.ms)

    @rule()
    def compactor_dies(self) -> None:
        self.compaction.begin_again()

    @rule()
    def shard_dies(self) -> None:
        self.rig.boot()

    @rule(cleanly=st.booleans())
    def service_restarts(self, cleanly: bool) -> None:
        if cleanly:
            self.rig.shard.close()
        self.rig.restart_service()
        self.frontend.close()
        self.frontend = Frontend(self.rig)
        self.compaction.begin_again()
        for name, model in self.models.items():
            self._lost_from_ram(name, model)

    def _lost_from_ram(self, name: str, model: Model) -> None:
        """Take records that were in RAM and in no segment for lost. A tombstone says so, and the head is at least what
        it was.
        """
        view = self.rig.view(name)
        assert view.head_seq >= model.head_seq
        kept = {seq for seq, _ in self.compaction.read(name)}
        gone = {seq for seq, (_, _, _, in_ram) in model.live.items() if in_ram and seq not in kept}
        for seq in gone:
            del model.live[seq]
        lost = self._lost(name)
        assert lost <= model.ever_in_ram | model.lost | set(range(model.head_seq + 1, view.head_seq + 1))
        assert gone <= lost | set(range(view.evict_floor)), "each with a tombstone"
        assert view.evict_floor >= model.evict_floor
        model.head_seq, model.evict_floor, model.lost = view.head_seq, view.evict_floor, lost
        model.ever_in_ram |= lost

    def _lost(self, name: str) -> set[int]:
        topic = self.rig.hosted(name).topic
        entries = topic.index.entries(topic.earliest_seq, topic.head_seq) if topic.records else array("Q")
        gone = LOCATION_LOST | LOCATION_DELETED
        return {
            seq for seq, word in zip(entries[0::4], entries[3::4], strict=True) if word >> 32 & gone == LOCATION_LOST
        }

    # -- what must hold

    @precondition(lambda self: bool(self.models))
    @invariant()
    def everything_is_as_it_must_be(self) -> None:
        for name, model in self.models.items():
            view = self.rig.view(name)
            assert view.head_seq == model.head_seq
            records = self.compaction.read(name)
            assert [seq for seq, _ in records] == sorted({seq for seq, _ in records})
            assert dict(records) == {seq: data for seq, (data, *_) in model.live.items()}
            assert view.records == len(model.live)
            assert view.evict_floor == model.evict_floor
            assert view.earliest_seq == min(model.live, default=view.head_seq + 1)
            assert view.evict_floor <= view.earliest_seq
            self._read_as_clients_do(name, model.at(self.rig.clock.ms))

    def _read_as_clients_do(self, name: str, model: Model) -> None:
        """Pages of a few records from the first on, and one from somewhere in between."""
        found: dict[int, bytes] = {}
        cursor, limit = 0, 1 + model.head_seq % 7
        gaps: set[int] = set()
        while True:
            page = self.frontend.page(name, cursor, limit)
            assert (page.head_seq, page.earliest_seq) == (model.head_seq, model.earliest_seq)
            gaps |= self._gap(page, cursor, model)
            records = {record.seq: bytes(record.data) for record in served(page.body)}
            assert len(records) == page.count <= limit
            assert list(records) == sorted(seq for seq in model.live if cursor < seq <= page.next_from_seq)
            found |= records
            if page.caught_up:
                break
            assert page.next_from_seq > cursor
            cursor = page.next_from_seq
        assert found == {seq: data for seq, (data, *_) in model.live.items()}
        assert model.lost <= gaps, "what is lost behind records that live"
        between = model.head_seq * 2 // 3
        self._gap(self.frontend.page(name, between, limit), between, model)

    def _gap(self, page: RecordPage, cursor: int, model: Model) -> set[int]:
        """The tombstone of a page is the one that is due (api §3.3); returns its seqs."""
        is_due = cursor + 1 < model.evict_floor
        tombstone = page.tombstone
        if tombstone is None:
            assert not is_due
            return set()
        gap = set(range(tombstone.gap_from, tombstone.gap_to + 1))
        if is_due:
            assert (tombstone.gap_from, tombstone.gap_to) == (cursor + 1, model.earliest_seq - 1)
            if not model.ever_in_ram:
                one_of = model.reasons if len(model.reasons) == 1 else {"cap", "ttl", "mixed"}
                assert tombstone.reason in one_of
        else:
            assert gap <= model.lost, "no tombstone for what was deleted"
            assert tombstone.reason == "restart"
        return gap


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete of a few records takes several turns."""
    monkeypatch.setattr(tag_search, "FOUND_MAX", 3)
    monkeypatch.setattr(tag_search, "TURN_MS", 0)
    monkeypatch.setattr(tag_search, "CATCH_UP_RECORDS", 2)
    monkeypatch.setattr(relogging, "TURN_SEQS", 3)
    monkeypatch.setattr(tag_search, "GATHERED_RECORDS", 1)
    monkeypatch.setattr(tags, "FORGET_FROM", 4)


class ManyEngines(Engine):
    """The same, many times."""


Engine.TestCase.settings = settings(max_examples=10, stateful_step_count=STEPS)
TestEngine = Engine.TestCase
ManyEngines.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=STEPS)
TestManyEngines = pytest.mark.long(ManyEngines.TestCase)
pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore::hypothesis.errors.HypothesisWarning")]
