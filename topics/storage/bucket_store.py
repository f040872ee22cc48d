"""The store of objects in a bucket (`segment_store.py` has the contract): S3, Google Cloud Storage, Azure, or a
folder by `file://`. The library is `obstore`, loaded with the first call: a service without a bucket does not need it.

A bucket may lose objects, repeat requests and cut objects short. So the store only creates objects, never writes over
one, and reads each back: a segment's file leaves the data directory only after the same bytes came out of the bucket.
If the bucket took a request but did not answer, the store repeats the request and finds its own object.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from topics.storage.frame import Bytes

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore, RetryConfig

RETRIES_MAX: Final = 3
"""Number of repeats of a request when the bucket throttles, fails or hangs up."""
OWNER_NAME: Final = "owner"
NO_BUCKET: Final = "there is no such bucket: make it, or mend the URL"
CONNECT_MS: Final = 3_000
_REASON_CHARS_MAX: Final = 400
_QUERY: Final = re.compile(r"(?<=://)([^\s?]+)\?\S*")
_OUT_OF_RANGE: Final = re.compile(r"code: 416|[Rr]ange was invalid|Wanted range starting")
_TOOK: Final = re.compile(r" in [0-9.]+(?:ns|µs|ms|s)\b")
_SAID: Final = re.compile(r"<\?xml.*?<Code>([^<]*)</Code>\s*<Message>([^<]*)</Message>.*")
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|specified (bucket|container) does not exist")
_NO_TLS: Final = re.compile(r"http://\S+ - HTTP error: builder error")
_HUNG_UP: Final = "error sending request"
_NO_CREDENTIALS: Final = re.compile(
    r"Generic \w+ error: (Missing (Secret)?Access|Account must be|Error performing (token request|[A-Z]+"
    r" https?://[^/ ]+/latest/(api/token|meta-data/iam)))"
)
_TRUE: Final = frozenset({"1", "true"})


class BucketStore:
    """The objects below `url`. It holds no connection before its first call, so a process that forks may have it."""

    def __init__(self, url: str, timeout_ms: int, owner: Callable[[], str] | None = None) -> None:
        """`timeout_ms` bounds each request; repeats begin within half of it. `owner` returns the id of the service for
        which this store puts and deletes, then a blank and a name for people. A store that only reads has no `owner`.
        """
        self._url = url
        self._timeout_ms = timeout_ms
        self._owner = owner

    def put(self, name: str, pieces: Iterable[Bytes]) -> None:
        """Create the object and read it back. Replace other bytes under its name: a killed `put` left them."""
        content = b"".join(pieces)
        for _ in range(2):
            self.create(name, content)
            if self._holds(name, content):
                self._sync(name)
                return
            self.delete(name)
        raise OSError(errno.EIO, "gives other bytes than were put there", self.place(name))

    def create(self, name: str, content: Bytes) -> bool:
        """Make the object. Return False, and leave it alone, if there is one already."""
        self._claim()
        from obstore import put
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            with self._errors(name), suppress(AlreadyExistsError, PreconditionError):
                # One request: a multipart upload cannot be made on the condition that there is no such object.
                put(self._bucket, name, content, mode="create", use_multipart=False)
                return True
        except OSError as error:
            # Some stores refuse an existing name before they have read the whole request, and hang up.
            if _HUNG_UP not in str(error) or not self.exists(name):
                raise
        return False

    def read_range(self, name: str, offset: int, length: int) -> bytes:
        if not length:
            return b""
        from obstore import get_range

        try:
            with self._errors(name):
                found = get_range(self._bucket, name, start=offset, length=length).to_bytes()
        except OSError as error:
            if _OUT_OF_RANGE.search(str(error)):
                self._check_end(name, offset + length)
            raise
        if len(found) != length:
            self._check_end(name, offset + length)
            raise OSError(errno.EIO, f"gave {len(found)} bytes of {length} from {offset} on", self.place(name))
        return found

    def delete(self, name: str) -> None:
        from obstore import delete

        self._claim()
        with suppress(FileNotFoundError), self._errors(name):
            delete(self._bucket, name)

    def list(self, prefix: str) -> list[str]:
        from obstore import list as list_objects

        # The library lists by whole parts of a path only.
        directory = prefix.rpartition("/")[0]
        with self._errors(prefix):
            chunks = list_objects(self._bucket, directory or None, chunk_size=1000)
            names = [found["path"] for chunk in chunks for found in chunk]
        return sorted(name for name in names if name.startswith(prefix))

    def exists(self, name: str) -> bool:
        try:
            self.len(name)
        except FileNotFoundError:
            return False
        return True

    def len(self, name: str) -> int:
        from obstore import head

        with self._errors(name):
            return head(self._bucket, name)["size"]

    def place(self, name: str) -> str:
        return f"{self._url}/{name}"

    def owner_problem(self, own: str | None) -> str | None:
        """Return a sentence if the prefix belongs to another service than `own` (None: this service has no id yet)."""
        root = self._root()
        try:
            owner = root.read_range(OWNER_NAME, 0, root.len(OWNER_NAME)).decode(errors="replace")
        except FileNotFoundError:
            return None
        if own is not None and owner.partition(" ")[0] == own.partition(" ")[0]:
            return None
        return (
            f"belongs to service {owner}, and this is {'a new service' if own is None else f'service {own}'}: give each"
            " service a prefix of its own in TOPICS_COLD_URL; only if the other is gone for good and this one has its"
            " data, delete this object"
        )

    def _claim(self) -> None:
        """Make the service the owner of the prefix before it changes anything there: put an object beside `topics/`.
        Raise PermissionError if another service owns the prefix.
        """
        if self._owner is None:
            return
        own, root = self._owner(), self._root()
        if not root.create(OWNER_NAME, own.encode()):
            problem = self.owner_problem(own)
            if problem is not None:
                raise OSError(errno.EPERM, problem, root.place(OWNER_NAME))
        self._owner = None

    def _root(self) -> BucketStore:
        return BucketStore(self._url.rpartition("/")[0], self._timeout_ms)

    @cached_property
    def _bucket(self) -> ObjectStore:
        from obstore.store import from_url

        if self._url.startswith("file:"):
            return from_url(self._url, mkdir=True, automatic_cleanup=True)
        client: ClientConfig = {
            "connect_timeout": timedelta(milliseconds=min(CONNECT_MS, self._timeout_ms)),
            "timeout": timedelta(milliseconds=self._timeout_ms),
            # Options given here replace what the library would take from the environment.
            "allow_http": any(
                os.environ.get(f"{of}_ALLOW_HTTP", "").lower() in _TRUE for of in ("AWS", "AZURE", "GOOGLE")
            ),
        }
        retries: RetryConfig = {
            "max_retries": RETRIES_MAX,
            # A reader that waits this long must learn the reason of the failure, not only that time ran out.
            "retry_timeout": timedelta(milliseconds=self._timeout_ms / 2),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        return from_url(self._url, client_options=client, retry_config=retries)

    def _holds(self, name: str, content: bytes) -> bool:
        """Read the whole object back. True if it has exactly these bytes."""
        from obstore import get

        at = 0
        with self._errors(name):
            found = get(self._bucket, name)
            if found.meta["size"] != len(content):
                return False
            for chunk in found.stream(min_chunk_size=1 << 20):
                piece = bytes(chunk)
                if content[at : at + len(piece)] != piece:
                    return False
                at += len(piece)
        return at == len(content)

    def _check_end(self, name: str, end: int) -> None:
        """Raise EOFError if the object ends before `end`. Else the request failed for another reason."""
        if self.len(name) < end:
            raise EOFError(f"{self.place(name)} ends before byte {end}")

    def _sync(self, name: str) -> None:
        """Sync an object of a `file://` store and its directories to the disk: the library does not."""
        if not self._url.startswith("file:"):
            return
        found = unquote(urlsplit(self.place(name)).path)
        for _ in range(4):  # the file, the folders of its topic and of all topics, and the root with that one's name
            fd = os.open(found, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            found = os.path.dirname(found)

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Turn the library's errors into OSError, with the place and one line of why."""
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            PermissionDeniedError,
            PreconditionError,
            UnauthenticatedError,
        )

        try:
            yield
        except (AlreadyExistsError, PreconditionError):
            raise
        except FileNotFoundError as error:
            reason = NO_BUCKET if _NO_BUCKET.search(str(error)) else "is not in the bucket"
            raise FileNotFoundError(errno.ENOENT, reason, self.place(name)) from None
        except BaseError as error:
            reason = _reason(error)
            # The library reports a denied listing like any other failure.
            denied = isinstance(error, PermissionDeniedError | UnauthenticatedError) or "code: 403" in reason
            if _NO_CREDENTIALS.match(reason):
                reason = f"no credentials were found: set the variables of its provider, see docs/bucket.md ({reason})"
            elif _NO_BUCKET.search(reason):  # as a failed listing says it
                reason = NO_BUCKET
            elif _NO_TLS.search(reason):
                reason = f"an endpoint without TLS needs AWS_ALLOW_HTTP=true (AZURE_ALLOW_HTTP) ({reason})"
            raise OSError(errno.EACCES if denied else errno.EIO, reason, self.place(name)) from None


def _reason(error: Exception) -> str:
    """Return the first paragraph, without queries of URLs, which may hold a signature, and without what differs each
    time, so that a log can leave out what it said before.
    """
    text = " ".join(str(error).partition("\n\nDebug source")[0].split())
    text = _SAID.sub(r"\1: \2", _TOOK.sub("", _QUERY.sub(r"\1?…", text)))
    return text[:_REASON_CHARS_MAX]


_PROBED: Final = b"can be read"


def probe(url: str, timeout_ms: int) -> Iterator[str]:
    """Yield a sentence for each thing that this process cannot do in the bucket, with the reason and the way out. It
    leaves no object behind, unless it cannot delete.
    """
    store = BucketStore(f"{url}/topics", timeout_ms)
    name = f"check/{secrets.token_hex(8)}"
    steps: list[tuple[str, Callable[[], bool], str]] = [
        ("write", lambda: store.create(name, _PROBED), "allow it to put objects (s3:PutObject)"),
        ("list", lambda: name in store.list("check/"), "allow it to list the bucket (s3:ListBucket)"),
        ("read", lambda: store.len(name) == len(_PROBED), "allow it to get objects (s3:GetObject)"),
        ("read a range", lambda: store.read_range(name, 4, 2) == _PROBED[4:6], "use a store that knows Range"),
        (
            "put on a condition",
            lambda: not store.create(name, b"other bytes"),
            "use a store that knows If-None-Match: a second put under a name must be refused",
        ),
        ("delete", lambda: _is_deleted(store, name), "allow it to delete objects (s3:DeleteObject)"),
    ]
    for what, does, right in steps:
        way_out = "let this user do so" if url.startswith("file:") else right
        try:
            reason = None if does() else "it did something else"
        except (OSError, EOFError) as error:
            reason = str(error)
            is_denied = isinstance(error, PermissionError) and "no credentials" not in reason
            if what == "write" and way_out is right and not is_denied:
                way_out = "check the URL, and the variables of its provider (docs/bucket.md)"
        if reason is not None:
            yield f"cannot {what}: {reason}; {way_out}"
            if what == "write":
                return  # nothing else can be tried without an object


def _is_deleted(store: BucketStore, name: str) -> bool:
    store.delete(name)
    return not store.exists(name)
