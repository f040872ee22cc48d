"""What a shard does with requests that make topics, change their configuration or end them (api §1)."""

from __future__ import annotations

from typing import Final

import msgspec

from topics.core.config import TopicConfig, incompatible_type
from topics.core.control_bodies import ConfigBody, encode_body
from topics.core.errors import TopicsError
from topics.shm.topic_messages import DeleteTopic, DeleteTopicReply, EnsureTopic, PutTopic, PutTopicReply
from topics.storage import frame
from topics.storage.frame import FLAG_MORE, FrameType
from topics.walshard.commit.draft import AloneHandler, Draft, Operation, Steps
from topics.walshard.commit.marks import head_mark
from topics.walshard.handlers.appends import creation
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.routers.routing import Routing
from topics.walshard.step_clock import StepClock

_ROWS_PER_FRAME: Final = 4096


class TopicCalls:
    """Makes, configures and deletes the topics of one shard. Everything prepared is committed before."""

    def __init__(self, catalog: Catalog, deletes: Deletes, routing: Routing, time: StepClock) -> None:
        self._catalog = catalog
        self._deletes = deletes
        self._routing = routing
        self._time = time

    @property
    def routes(self) -> dict[type, AloneHandler]:
        """The requests that are handled here."""
        return {PutTopic: self.put, EnsureTopic: self.ensure, DeleteTopic: self.delete}

    def put(self, call: PutTopic, _frontend: int) -> Steps[PutTopicReply]:
        """Makes a topic, or gives one that is there another configuration."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            return (yield from self._create(call.name, call.config))
        return (yield from self._configure(hosted, call))

    def ensure(self, call: EnsureTopic, _frontend: int) -> Steps[PutTopicReply]:
        """Makes a topic with the default configuration unless it is there."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            return (yield from self._create(call.name, TopicConfig()))
        return PutTopicReply(False, hosted.topic.config)

    def _create(self, name: str, config: TopicConfig) -> Steps[PutTopicReply]:
        now_ms = self._time.now.wall_ms
        hosted = self._catalog.make(name, config, now_ms)
        draft = Draft(reply=PutTopicReply(True, config))
        draft.add(creation(self._catalog, hosted, now_ms, draft, sync=True))
        yield draft
        return PutTopicReply(True, config)

    def _configure(self, hosted: Hosted, call: PutTopic) -> Steps[PutTopicReply]:
        topic, config = hosted.topic, call.config
        if not call.type_given:
            config = msgspec.structs.replace(config, type=topic.config.type)
        elif config.type != topic.config.type:
            raise incompatible_type(call.name, topic.config.type, config.type)
        reply = PutTopicReply(False, config)
        if config == topic.config:
            return reply
        # A longer ttl must not bring back what readers were told is gone (api §3.2).
        self._time.look_at_expiry()
        if not (yield from self._deletes.expire(hosted)):
            raise TopicsError(
                "storage_unavailable",
                f"what has expired in topic {call.name!r} cannot be logged now, so its configuration stays as it was;"
                " see the service's log",
            )
        if not (yield from self._routing.before_class_change(hosted)):
            raise TopicsError(
                "storage_unavailable",
                f"how far the routers into topic {call.name!r} are cannot be logged now; see the service's log",
            )
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

        operation = Operation(buffers, apply, sync=True, undo=lambda: hosted.release_config(descriptor))
        yield Draft([operation], touched=[hosted], reply=reply)
        return reply

    def delete(self, call: DeleteTopic, _frontend: int) -> Steps[DeleteTopicReply]:
        """Deletes a topic with everything in it."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            return DeleteTopicReply(False)
        yield from self._deletes.expire(hosted)
        topic = hosted.topic
        if call.if_empty and topic.records:
            raise TopicsError(
                "topic_not_empty",
                f"topic {call.name!r} holds {topic.records} records",
                {"topic": call.name, "count": topic.records},
            )
        draft = Draft(reply=DeleteTopicReply(True))

        def apply(_file_no: int, _offset: int) -> None:
            self._catalog.retire(hosted)
            draft.deleted.append(hosted)

        end = frame.encode(FrameType.TOPIC_DELETE, 0, topic.id, 0, self._time.now.wall_ms, b"", b"", b"")
        draft.add(Operation([end], apply, sync=True))
        yield draft
        return DeleteTopicReply(True)


def _attributes(hosted: Hosted, ts: int) -> list[bytes]:
    """What only the RAM log says of jobs that go on in a durable queue."""
    queue = hosted.topic.queue
    rows = [] if queue is None else queue.attributes().attributes
    bodies = [encode_body(rows[at : at + _ROWS_PER_FRAME]) for at in range(0, len(rows), _ROWS_PER_FRAME)]
    return [
        frame.encode(FrameType.JOB_ATTRIBUTES, FLAG_MORE, hosted.topic.id, 0, ts, b"", b"", body) for body in bodies
    ]
