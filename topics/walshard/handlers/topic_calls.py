"""Requests that make topics, change their configuration or delete them (api §1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from topics.core.config import TopicConfig, incompatible_type
from topics.core.control_bodies import ConfigFrameBody, encode_body
from topics.core.errors import TopicsError, storage_unavailable
from topics.shm.asks import Deleted
from topics.shm.topic_messages import DeleteTopic, EnsureTopic, PutTopic, PutTopicReply
from topics.storage.frame import FrameType
from topics.storage.topic_frames import control_frame, create_frame
from topics.walshard.commit.draft import CommitFirst, Draft, LogWrite, Steps, control_write
from topics.walshard.commit.logs import Logs
from topics.walshard.handlers.deletes import Deletes
from topics.walshard.handlers.relogging import RelogTurn, lease_turn, plan_turn
from topics.walshard.hosted.catalog import Catalog
from topics.walshard.hosted.hosted import Hosted
from topics.walshard.step_clock import StepClock


@dataclass(eq=False)
class TopicCalls:
    """Makes, configures and deletes one shard's topics. `log_feed` logs how far routers have copied into a topic; it
    returns False if the log refuses that.
    """

    _catalog: Catalog
    _logs: Logs
    _deletes: Deletes
    _log_feed: Callable[[Hosted], Steps[bool]]
    _ram_directory: str
    _time: StepClock

    def make(self, call: PutTopic | EnsureTopic, _frontend: int, group: Draft) -> PutTopicReply:
        """Make a topic in a group, or find that it exists as asked. Any change of one is a commit of its own."""
        name, config = call.name, call.config if isinstance(call, PutTopic) else None
        if name in group.made:
            raise CommitFirst  # the log may yet refuse the creation
        hosted = self._catalog.find(name)
        if hosted is None and isinstance(call, PutTopic) and call.is_set:
            return PutTopicReply(False, call.config)  # it was deleted between two turns
        if hosted is None:
            self._logs.require_room()
            now_ms = self._time.now.wall_ms
            hosted = group.made[name] = self._catalog.make(name, config or TopicConfig(), now_ms)
            group.add(LogWrite([create_frame(hosted.topic, now_ms)], sync=True, takes_room=True))
            return PutTopicReply(True, hosted.topic.config)
        queue = hosted.topic.queue
        if isinstance(call, PutTopic) and (config != hosted.topic.config or (queue is not None and queue.unlogged)):
            raise CommitFirst(self._configure(hosted, call), all=True)
        return PutTopicReply(False, hosted.topic.config)

    def _configure(self, hosted: Hosted, call: PutTopic) -> Steps[PutTopicReply]:
        topic, config = hosted.topic, call.config
        if not call.type_given:
            config = msgspec.structs.replace(config, type=topic.config.type)
        elif config.type != topic.config.type:
            raise incompatible_type(call.name, topic.config.type, config.type)
        reply = PutTopicReply(False, config)
        of_leases = PutTopicReply(False, config, msgspec.structs.replace(call, config=config, is_set=True))
        if call.is_set or config == topic.config:
            if (turn := lease_turn(hosted, self._time.now.wall_ms, of_leases)) is not None:
                yield turn
            return reply
        # A longer ttl must not bring back records that readers were told are gone (api §3.2).
        self._time.look_at_expiry()
        for steps, what in (
            (self._deletes.expire(hosted), "the expiry of records in"),
            (self._log_feed(hosted), "the positions of the routers into"),
        ):
            if not (yield from steps):
                why = f"{what} topic {call.name!r} cannot be logged now, so its configuration stays as it was"
                raise storage_unavailable(f"{why}; see the service's log")
        now_ms = self._time.now.wall_ms
        body = encode_body(ConfigFrameBody(config))
        relogged: RelogTurn | None = None
        if topic.config.durability == "ephemeral" and config.durability != "ephemeral":
            relogged = self._relogged(hosted, call, now_ms)
            if not relogged.is_last:
                rest = PutTopicReply(False, config, msgspec.structs.replace(call, turns=call.turns + 1))
                yield Draft(
                    [LogWrite(relogged.buffers, place=relogged.place, takes_room=True)],
                    touched=[hosted],
                    floors_of=[topic.id],
                    reply=rest,
                )
                return rest
        if topic.queue is not None and config.leases_durable and not topic.config.leases_durable:
            reply = of_leases  # from here on leases are logged as they change; those that are held follow in turns
        descriptor = hosted.prepare_config(config)
        configured, undo = partial(hosted.configured, config, descriptor), partial(hosted.release, descriptor)
        write = control_write(topic, now_ms, [(FrameType.CONFIG_UPDATE, body)], configured, undo, sync=True)
        if relogged is not None:
            write.buffers[:0] = relogged.buffers
            write.place, write.takes_room = relogged.place, True
        yield Draft([write], touched=[hosted], floors_of=[] if relogged is None else [topic.id], reply=reply)
        return reply

    def _relogged(self, hosted: Hosted, call: PutTopic, now_ms: int) -> RelogTurn:
        try:
            return plan_turn(hosted, self._ram_directory, call.turns, now_ms)
        except OSError as error:
            self._logs.lasting.error("records of the RAM log cannot be read", topic=call.name, reason=str(error))
            raise storage_unavailable(
                f"the records of topic {call.name!r} cannot be read to make them durable; see the service's log",
                topic=call.name,
            ) from error

    def delete(self, call: DeleteTopic, _frontend: int) -> Steps[Deleted]:
        """Delete a topic with everything in it."""
        hosted = self._catalog.find(call.name)
        if hosted is None:
            return Deleted(False)
        yield from self._deletes.expire(hosted)
        topic = hosted.topic
        if call.if_empty and topic.records:
            raise TopicsError(
                "topic_not_empty",
                f"topic {call.name!r} holds {topic.records} records",
                {"topic": call.name, "count": topic.records},
            )
        reply = Deleted(True)
        end = control_frame(FrameType.TOPIC_DELETE, topic.id, self._time.now.wall_ms)
        yield Draft([LogWrite([end], sync=True)], deleted=[hosted], reply=reply)
        return reply
