"""A page as it stands in an answer (api §3): a diff and a named cursor say the same of it."""

from __future__ import annotations

from typing import Final

from topics.frontend.answers import encode_json
from topics.frontend.reads.reading import Page

PAGE_MEMBERS: Final = (
    b'"records":[%b],"next_from_seq":%d,"head_seq":%d,"earliest_seq":%d,"durable_seq":%d,"epoch":"%016x",'
    b'"caught_up":%b,"tombstone":%b,"lag":%d'
)
"""To be filled in with `page_values`, together with the rest of the answer: the records are copied once."""


def page_values(page: Page) -> tuple[bytes | int, ...]:
    """What PAGE_MEMBERS says of this page."""
    return (
        page.body,
        page.next_from_seq,
        page.head_seq,
        page.earliest_seq,
        page.durable_seq,
        page.topic_id,
        b"true" if page.caught_up else b"false",
        b"null" if page.tombstone is None else encode_json(page.tombstone),
        page.head_seq - page.next_from_seq,
    )
