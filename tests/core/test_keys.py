"""Lists of keys, and the rights of one key (api §0.10)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topics.core.errors import TopicsError
from topics.core.keys import ANYONE, ApiKey, KeyRing, KeyScope, KeysError, parse_lines, parse_list
from topics.settings import load

R, W, D, A = KeyScope.READ, KeyScope.WRITE, KeyScope.DELETE, KeyScope.ADMIN


@pytest.mark.parametrize(
    ("entry", "scopes", "prefixes"),
    [
        ("k", KeyScope.ALL, ()),
        ("k:", KeyScope.ALL, ()),
        ("k::", KeyScope.ALL, ()),
        ("k:read", R, ()),
        ("k:r+w", R | W, ()),
        ("k:rw", R | W, ()),
        ("k:rw+rw+read", R | W, ()),
        ("k:d", D, ()),
        ("k:read+write+delete+admin", KeyScope.ALL, ()),
        ("k:a:", A, ()),
        ("k::in.", KeyScope.ALL, ("in.",)),
        ("k:r:b|a", R, ("a", "b")),
        ("k:r:chat:42:|a>b", R, ("a>b", "chat:42:")),
        ("k:r:in|in.a|in|other", R, ("in", "other")),
        ("  k:r:in \t", R, ("in",)),
    ],
)
def test_an_entry(entry: str, scopes: KeyScope, prefixes: tuple[str, ...]) -> None:
    (key,) = parse_list(entry)
    assert (key.scopes, key.prefixes) == (scopes, prefixes)
    assert key.digest == hashlib.sha256(b"k").digest()


def test_every_bad_entry_is_told_at_once_and_none_of_them_shown() -> None:
    with pytest.raises(KeysError) as refusal:
        parse_list("good,secret:x,,secret2::*,good")
    assert [problem.partition(":")[0] for problem in refusal.value.problems] == [
        "entry 2",
        "entry 3",
        "entry 4",
        "entry 5",
    ]
    assert "secret" not in str(refusal.value)
    assert "good" not in str(refusal.value)


@given(st.text(max_size=40))
def test_whatever_is_refused_is_not_repeated(text: str) -> None:
    marked = f"zqx{text}jvk"
    said = ""
    try:
        parse_list(marked)
    except KeysError as refusal:
        said = str(refusal)
    assert "zqx" not in said
    assert "jvk" not in said


def test_lines_have_comments_and_blanks() -> None:
    text = "# ours\r\na:r\r\n\n  # theirs\n  b:w:x , c\n"
    assert [key.scopes for key in parse_lines(text)] == [R, W, KeyScope.ALL]


visible = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=",:"), min_size=1, max_size=50)


@given(st.lists(visible, min_size=1, max_size=8, unique=True), visible)
def test_a_ring_finds_its_keys_and_no_other(listed: list[str], other: str) -> None:
    ring = KeyRing(parse_list(",".join(listed)))
    for at, text in enumerate(listed):
        assert ring.find(text.encode()) is ring.keys[at]
    if other not in listed:
        assert ring.find(other.encode()) is None
    assert ring.find(b"") is None


@pytest.mark.parametrize("presented", [b"first", b"second", b"third", b"none", b""])
def test_every_key_is_compared_whichever_is_presented(monkeypatch: pytest.MonkeyPatch, presented: bytes) -> None:
    ring = KeyRing(parse_list("first,second,third"))
    compared: list[tuple[bytes, bytes]] = []
    constant_time: Callable[[bytes, bytes], bool] = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return constant_time(one, other)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    ring.find(presented)
    digest = hashlib.sha256(presented).digest()
    assert compared == [(key.digest, digest) for key in ring.keys]


@pytest.mark.parametrize("held", [KeyScope.NONE, R, W, R | W, D | A, KeyScope.ALL])
@pytest.mark.parametrize("needed", [KeyScope.NONE, R, W, R | W, D, A])
def test_scopes(held: KeyScope, needed: KeyScope) -> None:
    key = ApiKey(b"", held, ())
    missing = [str(scope.name).lower() for scope in (R, W, D, A) if scope in needed and scope not in held]
    assert key.has(needed) is (not missing)
    if not missing:
        key.require(needed, ["any"])
        return
    with pytest.raises(TopicsError) as refusal:
        key.require(needed)
    assert (refusal.value.status, refusal.value.detail) == (403, {"missing_scopes": missing})


def test_names() -> None:
    key = ApiKey(b"", R, ("a.", "b"))
    key.require(R, ["a.x", "a.", "b", "bc"])
    for outside in ("a", "A.x", "c", ""):
        with pytest.raises(TopicsError, match="outside the prefixes"):
            key.require(R, ["b", outside])
    ANYONE.require(KeyScope.ALL, ["", "x"])


prefix_text = st.text("ab.", min_size=1, max_size=3).filter(lambda text: text[0] != ".")


@given(st.lists(prefix_text, max_size=4), st.text("ab.", max_size=3), st.text("ab.", max_size=5))
def test_narrowed_prefixes_are_what_was_asked_for_within_what_is_covered(own: list[str], asked: str, name: str) -> None:
    (key,) = parse_list("k:r:" + "|".join(own))
    narrowed = key.narrowed(asked)
    expected = name.startswith(asked) and (not own or any(name.startswith(prefix) for prefix in own))
    assert sum(name.startswith(prefix) for prefix in narrowed) == expected, "once, or not at all"


def test_neither_key_nor_digest_is_in_what_could_be_printed() -> None:
    settings = load({"TOPICS_API_KEYS": "s3cret:r:in,other"})
    assert settings.api_keys is not None
    ring = KeyRing(settings.api_keys)
    for key in ring.keys:
        shown = f"{settings!r} {settings} {key!r} {key}" + repr(ring.keys) + str(settings.masked())
        assert key.digest.hex() not in shown
        assert repr(key.digest)[2:-1] not in shown
    assert settings.masked()["api_keys"] == "2 masked"
    with pytest.raises(TypeError):
        msgspec.json.encode(settings)
