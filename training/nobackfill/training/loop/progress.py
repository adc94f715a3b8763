"""Progress bars on stderr, silent when stderr is no terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Bars on stderr; `visible` None means: when stderr is a terminal."""

    def __init__(self, visible: bool | None = None) -> None:
        self.visible = sys.stderr.isatty() if visible is None else visible

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
        """A bar over `total` epochs; the yielded function advances by one and shows a loss."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with RichProgress(*columns, console=console, disable=not self.visible) as bars:
            task = bars.add_task(title, total=total, completed=done, loss="")

            def advance(loss: float) -> None:
                bars.update(task, advance=1, loss=f"loss {loss:.3f}")

            yield advance
