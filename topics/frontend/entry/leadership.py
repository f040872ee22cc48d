"""A service leads, or only reads: because it follows another one, or because another one took over from it."""

from __future__ import annotations

from topics.core.errors import TopicsError
from topics.settings import Settings
from topics.shm.control import ControlPage
from topics.storage.filesystem import FileSystem
from topics.storage.follow_note import read_note


class Leadership:
    """Answers for one frontend. Owns nothing: the control page and the follower's note say all."""

    def __init__(self, settings: Settings, page: ControlPage, fs: FileSystem) -> None:
        self._settings = settings
        self._page = page
        self._fs = fs

    def why_not_leader(self) -> TopicsError | None:
        """Return the error for what changes anything; None if this service leads."""
        if self._settings.follow is not None:
            return self._follows()
        if self._page.is_taken_over:
            return TopicsError(
                "not_leader",
                "another service took over from this one, which only reads now; its status and its log say who: write"
                " to that one",
            )
        return None

    def lag_ms(self, now_ms: int) -> int | None:
        """Return how old the state of this service may be; None if it leads."""
        return None if self._settings.follow is None else self._page.follow_lag_ms(now_ms)

    def _follows(self) -> TopicsError:
        try:
            note = read_note(self._fs, self._settings.data_dir)
        except OSError:
            note = None  # the process that owns it says what is wrong
        if note is not None and note.leader_url:
            where, detail = note.leader_url, {"leader": note.leader_url}
        else:
            where, detail = "it", {}
        return TopicsError("not_leader", f"this service follows another one and only reads: write to {where}", detail)
