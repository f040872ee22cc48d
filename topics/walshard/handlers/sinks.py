"""The shard's part in transactions over topics (api §6). It keeps the last batch of each sink that it owns, and
publishes stages into its topics. A frontend drives a commit from sink to topics (`frontend/txn/coordinator.py`).

All steps are idempotent: anyone may ask for any of them again, at any time.
"""

from __future__ import annotations

import os
from array import array

from topics.core.errors import TopicsError, storage_unavailable
from topics.core.idempotency import stage_key
from topics.core.names import owner_shard
from topics.log import get_logger
from topics.shm.append_messages import AppendOptions, AppendReply, AppendRequest
from topics.shm.asks import Done
from topics.shm.topic_messages import (
    SinkCall,
    StagePublish,
    StagesOver,
    TxnBegin,
    TxnEnd,
    TxnForget,
    TxnGet,
    TxnPending,
    TxnPendingReply,
    TxnReply,
)
from topics.storage import layout, txn_files
from topics.storage.filesystem import FileSystem, make_dirs, names_in, read_all, replace_file
from topics.storage.txn_files import Sink, TxnFileDamagedError
from topics.walshard.commit.draft import CommitFirst, Draft
from topics.walshard.handlers.appends import Appends
from topics.walshard.hosted.catalog import Catalog

log = get_logger()


class Sinks:
    """Handles the sinks that this shard owns, and the stages of its topics. It owns the sinks' files."""

    def __init__(
        self, fs: FileSystem, data_dir: str, shard: int, shards: int, catalog: Catalog, appends: Appends
    ) -> None:
        self._fs = fs
        self._directory = layout.sinks_dir(data_dir)
        self._stages = layout.stages_dir(data_dir)
        self._shard = shard
        self._shards = shards
        self._catalog = catalog
        self._appends = appends
        self._known: dict[str, Sink] = {}
        """Existing sinks whose files were read. Names without a file are not kept: clients may ask for any number."""

    def take(self, call: SinkCall, _frontend: int, group: Draft) -> TxnReply | TxnPendingReply | Done:
        """Carry out a call about a sink. Commit the group first, so that a sink's file is replaced only after all that
        was published for it is logged.
        """
        if group:
            raise CommitFirst
        match call:
            case TxnBegin():
                return self._begin(call)
            case TxnEnd():
                return self._end(call)
            case TxnForget():
                return self._forget(call.sink)
            case TxnGet():
                return _as_known(self._find(call.sink))
            case TxnPending():
                return TxnPendingReply(self._pending())

    def publish(self, call: StagePublish, _frontend: int, group: Draft) -> AppendReply:
        """Append the records of a stage. If its topic was deleted and made again after the decision, its records are
        those of the deleted topic and went with it; unless this batch itself has made the topic again, or the log has
        lost the topic.
        """
        request = self.staged(call)
        if topic_id := txn_files.topic_id_of(request.frames):
            if call.name in group.made:
                raise CommitFirst
            hosted = self._catalog.find(call.name)
            if hosted is not None and hosted.topic.id != topic_id and self._catalog.was_made(topic_id):
                published = hosted.topic.idempotency.published_stages()
                if not any((call.sink, call.batch) == (sink, batch) for sink, batch, _stages in published):
                    return AppendReply(0, 0, 0, False, True, hosted.topic.config.durability, 0, 0)
        return self._appends.prepare(request, _frontend, group)

    def stages_over(self, call: StagesOver, _frontend: int, _group: Draft) -> None:
        """Forget the keys of a batch that is published everywhere. Nobody waits for a reply."""
        hosted = self._catalog.find(call.name)
        if hosted is not None:
            hosted.topic.idempotency.forget_stages(call.sink, call.batch)

    def staged(self, call: StagePublish) -> AppendRequest:
        """Return the append request that publishes a stage. It has no records if the stage's file is gone; then it can
        only be answered as a repetition. Raise `409 fenced` if the batch is not decided, or is over: the topic may have
        forgotten then that the stage was published.
        """
        self._require_pending(call.sink, call.batch)
        path = os.path.join(self._stages, txn_files.stage_name(call.stage))
        key = stage_key(call.sink, call.batch, call.stage)
        try:
            stage = txn_files.decode_stage(read_all(self._fs, path))
        except FileNotFoundError:
            return AppendRequest(AppendOptions(call.name, False, key=key), 0, array("Q"), b"", bytearray())
        except (OSError, TxnFileDamagedError) as error:
            raise _unusable(path, error) from None
        if stage.topic != call.name:
            raise _unusable(path, TxnFileDamagedError(f"it is of topic {stage.topic!r}, not {call.name!r}"))
        records = len(stage.offset_len), stage.offset_len, stage.record_flags, stage.frames
        return AppendRequest(AppendOptions(stage.topic, key=key), *records)

    def _require_pending(self, sink: str, batch: int) -> None:
        """Raise `fenced` unless the sink's file says that the batch is being published. Another shard may own the sink.
        It replaces the file only once all stages are answered, and until then topics keep the keys of published stages.
        """
        try:
            decided, pending_count = txn_files.read_sink_head(self._fs, self._directory, sink)
        except (OSError, TxnFileDamagedError) as error:
            raise _unusable(os.path.join(self._directory, txn_files.sink_name(sink)), error) from None
        if decided != batch or not pending_count:
            raise TopicsError("fenced", f"batch {batch} of sink {sink!r} is not being published", {"batch": decided})

    def _begin(self, call: TxnBegin) -> TxnReply:
        known = self._find(call.sink)
        if known is not None and (known.pending or call.batch <= known.batch):
            return _as_known(known)
        for stage, _topic in sorted(call.stages):  # in the order of claiming: the first missing one was lost
            if not txn_files.can_be_decided(os.path.join(self._stages, txn_files.stage_name(stage))):
                given = txn_files.unclaimed_id(stage)
                raise TopicsError("not_found", f"there is no stage {given!r}: dropped, expired, or another batch's")
        decided = Sink(call.sink, call.batch, call.stages)
        self._store(decided)
        return TxnReply("begun", call.batch, call.stages)

    def _end(self, call: TxnEnd) -> Done:
        known = self._find(call.sink)
        if known is not None and known.batch == call.batch and known.pending:
            self._store(Sink(call.sink, call.batch, []))
        return Done()

    def _forget(self, sink: str) -> TxnReply:
        known = self._find(sink)
        if known is None:
            return _as_known(None)
        if known.pending:
            raise TopicsError(
                "out_of_order", f"batch {known.batch} of sink {sink!r} is being published; ask again when it is"
            )
        path = os.path.join(self._directory, txn_files.sink_name(sink))
        try:
            self._fs.unlink(path)
            self._fs.fsync_dir(self._directory)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise _cannot(path, error) from error
        self._known.pop(sink, None)
        return _as_known(known)

    def _find(self, sink: str) -> Sink | None:
        known = self._known.get(sink)
        if known is None:
            known = self._load(os.path.join(self._directory, txn_files.sink_name(sink)))
            if known is not None:
                self._known[sink] = known
        return known

    def _load(self, path: str) -> Sink | None:
        try:
            return txn_files.decode_sink(read_all(self._fs, path), os.path.basename(path))
        except FileNotFoundError:
            return None
        except (OSError, TxnFileDamagedError) as error:
            raise _unusable(path, error) from None

    def _store(self, sink: Sink) -> None:
        path = os.path.join(self._directory, txn_files.sink_name(sink.sink))
        self._known.pop(sink.sink, None)  # if the write fails, the file must be read again
        try:
            make_dirs(self._fs, self._directory)
            replace_file(self._fs, path, txn_files.encode_sink(sink))
        except OSError as error:
            raise _cannot(path, error) from error
        self._known[sink.sink] = sink

    def _pending(self) -> list[tuple[str, int, list[tuple[str, str]]]]:
        """Return (sink, batch, stages) of batches that are decided and not over. Log damaged files, and go on."""
        found = []
        for name in sorted(filter(txn_files.is_sink_name, names_in(self._fs, self._directory))):
            try:
                sink = self._load(os.path.join(self._directory, name))
            except TopicsError as error:
                log.error("a sink cannot be read", reason=error.message)
                continue
            if sink is not None and sink.pending and owner_shard(sink.sink, self._shards) == self._shard:
                found.append((sink.sink, sink.batch, sink.pending))
        return found


def _as_known(sink: Sink | None) -> TxnReply:
    if sink is None:
        return TxnReply("none", 0, [])
    return TxnReply("pending" if sink.pending else "committed", sink.batch, sink.pending)


def _unusable(path: str, error: Exception) -> TopicsError:
    return storage_unavailable(f"{path} cannot be used: {error}", cause="damaged")


def _cannot(path: str, error: OSError) -> TopicsError:
    return storage_unavailable(f"{path} cannot be written: {error.strerror}", cause="write")
