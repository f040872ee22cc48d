"""Pages of copies: those of records that pass unchanged are what laying each out gives."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.core.list_index import ListIndex
from tests.storage.test_copies import Record, log_of, record
from topics.core.config import TopicConfig
from topics.core.routers import FeedRouter, Router, RouterSpec
from topics.core.topic import Topic
from topics.storage.copies import as_copies, each_copy
from topics.storage.frame import lay_out
from topics.walshard.routers.page import CopyPage, copy_page, pass_unchanged

FIRST_SEQ = 5

filters = st.sampled_from([None, ["tag", "Eq", "a"], ["tag", "Glob", "t*"], ["tag", "Glob", "*"], ["tag", "Eq", "no"]])


def dest(**config: Any) -> Topic:
    return Topic(11, "dest", TopicConfig(**config), ListIndex(1))


def feed_router(filter_: list[str] | None, **spec: Any) -> FeedRouter:
    return FeedRouter(Router(3, 1, "r", RouterSpec("a", "b", filter=filter_, **spec)), 0)


@given(st.lists(record, min_size=1, max_size=40), st.integers(0, 6), filters)
def test_records_that_pass_as_they_are_or_not_at_all(
    records: list[Record], hops: int, filter_: list[str] | None
) -> None:
    copies = as_copies(*log_of(records, hops), 9, FIRST_SEQ)
    assert bytes(copies.location_flags) == bytes(lay_out(records).flags)
    one = feed_router(filter_)
    assert pass_unchanged([one], FIRST_SEQ - 1, 0)
    originals = each_copy(copies.frames[:], copies.rows)
    laid_out = copy_page(originals, [one], "a", 9, FIRST_SEQ - 1, dest(), 0)
    page = CopyPage.unchanged(FIRST_SEQ - 1, copies, one.router)
    for of_page in (page, laid_out):
        of_page.copies_by_router.setdefault(3, 0)
    assert page.stamped(11, 1, 2**41) == laid_out.stamped(11, 1, 2**41)
    assert (page.source_seq, page.offset_len, page.record_flags, page.copies_by_router, page.size_bytes) == (
        laid_out.source_seq,
        laid_out.offset_len,
        laid_out.record_flags,
        laid_out.copies_by_router,
        laid_out.size_bytes,
    )


def test_which_records_do_not_pass_as_they_are() -> None:
    plain = feed_router(None)
    assert not pass_unchanged([plain, feed_router(None)], 4, 0)
    assert not pass_unchanged([plain], 4, 5)
    assert not pass_unchanged([FeedRouter(plain.router, 5)], 4, 0)
    for spec in ({"preserve_tag": False}, {"preserve_node": False}, {"guarantee": "exactly_once"}):
        assert not pass_unchanged([feed_router(None, **spec)], 4, 0)
