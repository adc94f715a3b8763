"""What the demo shows while it works: a line a step, bars under it where there is a terminal."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

# Shows how much of the whole is done.
Bar = Callable[[float], None]
# Seconds between lines of progress where no bar can be drawn.
LINE_EVERY = 30.0


def format_duration(seconds: float) -> str:
    """A duration for people, e.g. "40 seconds" or "12 minutes"."""
    if seconds < 100:
        return f"{max(1, round(seconds))} seconds"
    if seconds < 100 * 60:
        return f"{round(seconds / 60)} minutes"
    return f"{seconds / 3600:.1f} hours"


class Screen:
    """Lines and bars on stderr; standard output is left to the final table. Off a terminal, a line
    of progress every LINE_EVERY seconds stands for a bar."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)
        self.steps = 0
        self._number = 0
        self._bars: Progress | None = None

    def print_line(self, text: str) -> None:
        self._console.print(text)

    def skip(self, title: str) -> None:
        """Tell of a step that an earlier, interrupted run finished."""
        self._number += 1
        self.print_line(f"[dim]{self._number:2}/{self.steps} {title}: done before[/dim]")

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        """A step under way; bars may be added to it."""
        self._number += 1
        start = time.monotonic()
        self.print_line(f"[bold]{self._number:2}/{self.steps} {title}[/bold]")
        columns = (
            TextColumn("      {task.description:<34}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        visible = self._console.is_terminal
        with Progress(*columns, console=self._console, disable=not visible) as self._bars:
            yield
        self._bars = None
        self.print_line(f"      done in {time.monotonic() - start:.1f} s")

    def bar(self, name: str, total: float) -> Bar:
        """A bar of the present step; call it with what is done so far, of `total`."""
        assert self._bars is not None, "bars belong to a step"
        bars, task = self._bars, self._bars.add_task(name, total=total)
        began = said = time.monotonic()

        def update(done: float) -> None:
            nonlocal said
            bars.update(task, completed=done)
            now = time.monotonic()
            if not self._console.is_terminal and now - said >= LINE_EVERY:
                said = now
                left = (now - began) * (total - done) / done if done else None
                rest = "" if left is None else f", about {format_duration(left)} left"
                self.print_line(f"      {name}: {done:g} of {total:g}{rest}")

        return update
