"""Leadership: a service takes writes unless it follows another one, or another one has taken over from it."""

from __future__ import annotations

from topics.core.errors import TopicsError
from topics.settings import Settings
from topics.shm.control import ControlPage
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import read_note


class Leadership:
    """Tells one frontend whether its service leads. Owns nothing: it reads the control page and the follower's note."""

    def __init__(self, settings: Settings, page: ControlPage, fs: FileSystem) -> None:
        self._settings = settings
        self._page = page
        self._fs = fs

    def why_not_leader(self) -> TopicsError | None:
        """Return the error for requests that change anything; None if this service leads."""
        if self._settings.follow is not None:
            return self._follows()
        if self._page.is_taken_over:
            return TopicsError(
                "not_leader",
                "another service took over from this one, which only reads now; its status and its log say who: send"
                " this to that one",
            )
        return None

    def lag_ms(self, now_ms: int) -> int | None:
        """Return how many ms this service may be behind its leader; None if it follows none."""
        return None if self._settings.follow is None else self._page.follow_lag_ms(now_ms)

    def _follows(self) -> TopicsError:
        try:
            note = read_note(self._fs, self._settings.data_dir)
        except OSError:
            note = None  # the follower's process, which owns the note, reports what is wrong with it
        if note is not None and note.leader_url:
            where, detail = note.leader_url, {"leader": note.leader_url}
        else:
            where, detail = "that one", {}
        return TopicsError("not_leader", f"this service follows another one: send this to {where}", detail)
