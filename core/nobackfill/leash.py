"""Processes that were started to do a part of the work end when the one that started them does."""

import os
import threading
from multiprocessing import connection, parent_process


def end_with_parent() -> None:
    """In a process of multiprocessing's: end as soon as its parent has, however that ended; what is
    under way goes on in nobody's name otherwise, beside whoever starts it again."""
    parent = parent_process()
    assert parent is not None, "started by another process"

    def end() -> None:
        connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=end, name="leash", daemon=True).start()
