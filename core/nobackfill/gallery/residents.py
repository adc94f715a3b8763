"""Which gallery files of a process are open: a bound, as each takes about six file descriptors."""

import threading
from collections import deque
from typing import Protocol


class Resident(Protocol):
    """What can be closed for a while; nobackfill.gallery.connections.Connections is one."""

    recent: bool

    def rest(self) -> bool:
        """Close it until it is asked for again; False if it is in use just now. Never waits."""
        ...


class Residents:
    """Keeps about `most` of them open; what was not used for long is closed first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._open: deque[Resident] = deque()

    def opened(self, resident: Resident) -> None:
        """Tell that one more is open. Closes others, twice round at most: what was used since it
        was last looked at is passed over once."""
        with self._lock:
            self._open.append(resident)
            for _ in range(2 * len(self._open)):
                if len(self._open) <= self._most:
                    return
                oldest = self._open.popleft()
                if oldest.recent or not oldest.rest():
                    oldest.recent = False
                    self._open.append(oldest)
