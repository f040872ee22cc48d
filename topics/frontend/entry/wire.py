"""Decoding of request bodies (`topics/api/requests.py`) and of queries; a value that does not fit is a `400`.

A record's `data` stays the bytes it was sent as (`msgspec.Raw`): validated, never decoded (api §0.2).
"""

from __future__ import annotations

import base64
import binascii
import codecs
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeGuard, TypeVar

import msgspec
from starlette.datastructures import QueryParams
from xxhash import xxh32_digest

from topics.api.requests import U64_MAX, AppendBody, GivenConfig, Optional, RecordBody, StageBody, StartBody
from topics.core.errors import TopicsError, invalid
from topics.core.json_text import why_not_json

ValueT = TypeVar("ValueT")
BodyT = TypeVar("BodyT", bound=msgspec.Struct)

UTF8_STEP_BYTES: Final = 1 << 20
CHECKED_BYTES_MAX: Final = 2 << 20
_FIELD: Final = re.compile(r"(?:missing required field `|`\$\.?)([^`]*)`$")
"""The field at the end of an error of msgspec: one that is missing from the body itself, or the path of a value."""

_SOME_TOPIC: Final = "$.topics[...]"
"""The path in an error of msgspec that means the start of some topic (api §7)."""

append_decoder: Final = msgspec.json.Decoder(AppendBody)
stage_decoder: Final = msgspec.json.Decoder(StageBody)
config_decoder: Final = msgspec.json.Decoder(GivenConfig)
_decoders: Final[dict[type, msgspec.json.Decoder[Any]]] = {}
_meta_decoder = msgspec.json.Decoder(dict[str, str])
_raw_decoder: Final = msgspec.json.Decoder(msgspec.Raw)
_start_decoder: Final = msgspec.json.Decoder(StartBody)
_starts_decoder: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


def has_job_attributes(record: RecordBody) -> bool:
    """Return True if the record has a delay or an order key (api §9)."""
    return record.deliver_at is not None or record.delay_ms is not None or record.order_key is not None


def decode_as(body_type: type[BodyT], body: bytes) -> BodyT:
    """Decode a body of any type, and check its integers."""
    json_decoder = _decoders.get(body_type)
    if json_decoder is None:
        json_decoder = _decoders[body_type] = msgspec.json.Decoder(body_type)
    request: BodyT = decode(json_decoder, body)
    check_counts(request)
    return request


def given(raw: Optional) -> TypeGuard[msgspec.Raw]:
    """Return True if an optional field is present and not `null`."""
    return raw is not msgspec.UNSET and bytes(raw) != b"null"


def decode_meta(meta: msgspec.Raw, field: str) -> dict[str, str]:
    """Decode a record's meta, an object of strings. `field` names it in the error."""
    try:
        return _meta_decoder.decode(meta)
    except msgspec.MsgspecError as error:
        raise invalid(f"{field} must be an object whose values are strings: {error}", field=field) from None


def check_counts(request: msgspec.Struct, where: str = "") -> None:
    """Raise `400` for an integer above u64, with the name of its field; `where` the struct is comes before that."""
    for field in request.__struct_fields__:
        value = getattr(request, field)
        if type(value) is int and value > U64_MAX:
            raise invalid(f"{where}{field} must be an integer from 0 to 2^64-1", field=f"{where}{field}")


def decode(json_decoder: msgspec.json.Decoder[ValueT], body: bytes, member: str = "") -> ValueT:
    """Return the decoded body, or this member of one. Raise `400` with the position where it is not JSON, or the field
    that is wrong.
    """
    what = member or "the body"
    try:
        # msgspec checks the UTF-8 of what it decodes, not of `Raw` fields.
        if not body.isascii():
            _check_utf8(body)
        return json_decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        if len(body) <= CHECKED_BYTES_MAX:
            decode(_raw_decoder, body)  # it may be no JSON behind the value that does not fit
            if _SOME_TOPIC in message:
                message = message.replace(_SOME_TOPIC, f"$.topics.{_misfit(body)}")
        found = _FIELD.search(message)
        field = found[1] if found else member
        raise invalid(f"{what} does not fit: {message}", **({"field": field} if field else {})) from None
    except msgspec.DecodeError as error:
        raise not_json(body, str(error)) from None
    except RecursionError:
        raise invalid(f"{what} is not accepted: its JSON is nested too deeply") from None


def _misfit(body: bytes) -> str:
    """Return the first name in `topics` of a body whose start does not fit, which msgspec's error does not name."""
    with suppress(msgspec.ValidationError):
        for name, start in _starts_decoder.decode(_starts_decoder.decode(body)["topics"]).items():
            try:
                _start_decoder.decode(start)
            except msgspec.ValidationError:
                return name[:300]
    return "…"  # a key is there twice, and only its first value does not fit


def not_json(body: bytes, reason: str) -> TopicsError:
    """Return the `400` with the byte position where `body` stops being JSON."""
    why, position = why_not_json(body, reason)
    return invalid(f"the body {why}", position=position)


def _check_utf8(body: bytes) -> None:
    utf8 = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), UTF8_STEP_BYTES):
        pending = len(utf8.getstate()[0])
        try:
            utf8.decode(body[start : start + UTF8_STEP_BYTES], start + UTF8_STEP_BYTES >= len(body))
        except UnicodeDecodeError as error:
            raise not_json(body, f"invalid UTF-8 (byte {start - pending + error.start})") from None


PAGE_SIZE_DEFAULT: Final = 100
PAGE_SIZE_MAX: Final = 1000
_CURSOR_MARK: Final = b"after:"
_CHECKSUM_LEN: Final = 4
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


def parameter(query: QueryParams, name: str) -> str | None:
    """Return `?name`, None without one. Raise `400 invalid_request` if it is there more than once."""
    values = query.getlist(name)
    if len(values) > 1:
        raise invalid(f"?{name} is there {len(values)} times: give it once", field=name)
    return values[0] if values else None


def flag(query: QueryParams, name: str, default: bool) -> bool:
    """Return `?name=true|false` (or 1, 0). Raise `400 invalid_request`."""
    text = parameter(query, name)
    if text is not None and text not in _FLAGS:
        raise invalid(f"?{name} must be true or false, not {text[:100]!r}", field=name)
    return default if text is None else _FLAGS[text]


def count(query: QueryParams, name: str, default: int) -> int:
    """Return `?name=<u64>`. Raise `400 invalid_request`."""
    text = parameter(query, name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= U64_MAX):
        raise invalid(f"?{name} must be an integer from 0 to 2^64-1, not {text[:100]!r}", field=name)
    return int(text)


def page_size(query: QueryParams) -> int:
    """Return the `?page_size` of a list (api §0.8)."""
    return min(count(query, "page_size", PAGE_SIZE_DEFAULT) or PAGE_SIZE_DEFAULT, PAGE_SIZE_MAX)


def name_cursor(name: str) -> str:
    """Return the cursor of a list that continues after `name`: base64 of "after:", the name, and XXH32 of both."""
    content = _CURSOR_MARK + name.encode()
    return base64.urlsafe_b64encode(content + xxh32_digest(content)).decode().rstrip("=")


def name_after(cursor: str | None, check_name: Callable[[str], str]) -> str:
    """Return the name in a list cursor, "" without a cursor. Raise `400` for one that `name_cursor` did not make."""
    if cursor is None:
        return ""
    try:
        content = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        name = check_name(content[len(_CURSOR_MARK) : -_CHECKSUM_LEN].decode())
    except (ValueError, binascii.Error, TopicsError):
        name = ""
    # Another text may decode to the same name, so the whole cursor is compared.
    if not name or name_cursor(name) != cursor:
        raise invalid("?cursor did not come from a list: send next_cursor unchanged", field="cursor")
    return name
