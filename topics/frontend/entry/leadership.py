"""Leadership: a service takes writes unless it follows another one, or another one has taken over from it."""

from __future__ import annotations

from collections.abc import Callable

from topics.core.errors import TopicsError
from topics.settings import Settings
from topics.shm.control import ControlPage
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import FollowNote, read_note
from topics.storage.service_id import ArchiveNote, archive_note


class Leadership:
    """Tells one frontend whether its service leads. Owns nothing: it reads the control page, and the notes of a
    follower and of an archiver.
    """

    def __init__(self, settings: Settings, page: ControlPage, fs: FileSystem) -> None:
        self._settings = settings
        self._page = page
        self._directory = fs, settings.data_dir

    def why_not_leader(self) -> TopicsError | None:
        """Return the error for requests that change anything; None if this service leads."""
        if self._settings.follow is not None:
            return _not_leader("this service follows another one", lambda: read_note(*self._directory))
        if self._page.is_taken_over:
            what = "another service took over from this one, which only reads now, as its log says"
            return _not_leader(what, lambda: archive_note(*self._directory))
        return None

    def lag_ms(self, now_ms: int) -> int | None:
        """Return how many ms this service may be behind its leader; None if it follows none."""
        return None if self._settings.follow is None else self._page.follow_lag_ms(now_ms)


def _not_leader(what: str, read: Callable[[], FollowNote | ArchiveNote | None]) -> TopicsError:
    try:
        note = read()
    except OSError:
        note = None  # the process that owns the note reports what is wrong with it
    url = "" if note is None else note.leader_url
    return TopicsError("not_leader", f"{what}: send this to {url or 'that one'}", {"leader": url} if url else {})
