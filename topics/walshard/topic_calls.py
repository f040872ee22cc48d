"""What a shard does with requests that make topics, change their configuration or end them (api §1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from topics.core.config import TopicConfig, incompatible_type
from topics.core.control_bodies import ConfigBody, encode_body
from topics.core.errors import TopicsError
from topics.shm import messages
from topics.shm.topic_messages import DeleteTopic, DeleteTopicReply, EnsureTopic, PutTopic, PutTopicReply
from topics.storage import frame
from topics.storage.frame import FLAG_MORE, FrameType
from topics.walshard.appends import create_frame
from topics.walshard.catalog import Catalog
from topics.walshard.deletes import Deletes
from topics.walshard.group_commit import GroupCommit
from topics.walshard.head_marks import head_mark
from topics.walshard.hosted import Hosted
from topics.walshard.operation import Answer, Operation, Steps
from topics.walshard.queues.calls import Queues
from topics.walshard.routers.routing import Routing
from topics.walshard.step_clock import StepClock
from topics.walshard.watchers import Watchers

_ROWS_PER_FRAME: Final = 4096


class TopicCalls:
    """Of one shard, each a commit of its own: everything prepared is committed before. `host` makes a topic known whose
    creation is logged.
    """

    def __init__(
        self,
        catalog: Catalog,
        commits: GroupCommit,
        deletes: Deletes,
        host: Callable[[Hosted], None],
        queues: Queues,
        routing: Routing,
        watchers: Watchers,
        time: StepClock,
        run: Callable[[Steps[bool]], bool],
    ) -> None:
        self._run = run
        self._catalog = catalog
        self._commits = commits
        self._deletes = deletes
        self._host = host
        self._queues = queues
        self._routing = routing
        self._watchers = watchers
        self._time = time

    def take(self, call: PutTopic | EnsureTopic | DeleteTopic, answer: Answer) -> None:
        """Answers, or raises TopicsError or ArenaFullError; then nothing has changed."""
        hosted = self._catalog.find(call.name)
        match call:
            case PutTopic():
                if hosted is None:
                    self._create(call.name, call.config, answer)
                else:
                    self._configure(hosted, call, answer)
            case EnsureTopic():
                if hosted is None:
                    self._create(call.name, TopicConfig(), answer)
                else:
                    answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(False, hosted.topic.config))
            case DeleteTopic():
                if hosted is None:
                    answer.reply = messages.encode_reply(answer.request_id, DeleteTopicReply(False))
                else:
                    self._delete(hosted, call, answer)

    def _create(self, name: str, config: TopicConfig, answer: Answer) -> None:
        now_ms = self._time.now.wall_ms
        hosted = self._catalog.make(name, config, now_ms)
        answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(True, config))
        creation = create_frame(hosted, now_ms, 0)

        def apply(_file_no: int, _offset: int) -> None:
            self._host(hosted)

        if not self._commits.commit_one(Operation([creation], apply, sync=True, answer=answer)):
            self._catalog.abandon(hosted)

    def _configure(self, hosted: Hosted, call: PutTopic, answer: Answer) -> None:
        topic, config = hosted.topic, call.config
        if not call.type_given:
            config = msgspec.structs.replace(config, type=topic.config.type)
        elif config.type != topic.config.type:
            raise incompatible_type(call.name, topic.config.type, config.type)
        answer.reply = messages.encode_reply(answer.request_id, PutTopicReply(False, config))
        if config == topic.config:
            return
        # A longer ttl must not bring back what readers were told is gone (api §3.2).
        self._time.look_at_expiry()
        if not self._deletes.expire(hosted):
            raise TopicsError(
                "storage_unavailable",
                f"what has expired in topic {call.name!r} cannot be logged now, so its configuration stays as it was;"
                " see the service's log",
            )
        self._commits.before_log(hosted)
        self._run(self._routing.before_class_change(hosted))
        descriptor = hosted.prepare_config(config)
        now_ms = self._time.now.wall_ms
        body = encode_body(ConfigBody(config))
        update = frame.encode(FrameType.CONFIG_UPDATE, 0, topic.id, 0, now_ms, b"", b"", body)
        buffers: list[frame.Bytes] = [update]
        if topic.config.durability == "ephemeral":
            # What follows in the durable log begins behind the records that are only in RAM.
            head = head_mark(hosted, topic.head_seq, now_ms, FLAG_MORE)
            buffers[:0] = [head, *_attributes(hosted, now_ms)]

        def apply(_file_no: int, _offset: int) -> None:
            if len(buffers) > 1:  # the exact head took back what was reserved above it
                topic.head_ceiling = topic.head_seq
            hosted.configured(config, descriptor)

        if self._commits.commit_one(Operation(buffers, apply, sync=True, answer=answer)):
            self._commits.show_configured(hosted)
        else:
            hosted.release_config(descriptor)

    def _delete(self, hosted: Hosted, call: DeleteTopic, answer: Answer) -> None:
        self._deletes.expire(hosted)
        topic = hosted.topic
        if call.if_empty and topic.records:
            raise TopicsError(
                "topic_not_empty",
                f"topic {call.name!r} holds {topic.records} records",
                {"topic": call.name, "count": topic.records},
            )
        answer.reply = messages.encode_reply(answer.request_id, DeleteTopicReply(True))

        def apply(_file_no: int, _offset: int) -> None:
            self._commits.forget(hosted)
            self._routing.deleted(hosted)
            self._catalog.retire(hosted)
            self._queues.topic_gone(hosted)
            self._watchers.notify(hosted)

        end = frame.encode(FrameType.TOPIC_DELETE, 0, topic.id, 0, self._time.now.wall_ms, b"", b"", b"")
        self._commits.commit_one(Operation([end], apply, sync=True, answer=answer))


def _attributes(hosted: Hosted, ts: int) -> list[bytes]:
    """What only the RAM log says of jobs that go on in a durable queue."""
    queue = hosted.topic.queue
    rows = [] if queue is None else queue.attributes().attributes
    bodies = [encode_body(rows[at : at + _ROWS_PER_FRAME]) for at in range(0, len(rows), _ROWS_PER_FRAME)]
    return [
        frame.encode(FrameType.JOB_ATTRIBUTES, FLAG_MORE, hosted.topic.id, 0, ts, b"", b"", body) for body in bodies
    ]
