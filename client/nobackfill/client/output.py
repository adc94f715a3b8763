"""Print results on stdout, as one JSON object or as lines of text; progress bars go to stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from nobackfill.terminal import visible

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Output:
    """Where the results of one command go; `json` selects the form, `bars` enables progress."""

    json: bool = False
    bars: bool = True

    def result(self, answer: Mapping[str, object], *lines: str) -> None:
        """Print `answer` as one JSON object, or `lines` for people."""
        if self.json:
            print(json.dumps(answer))
            return
        for line in lines:
            print(visible(line))

    def note(self, line: str) -> None:
        """Print a remark on stderr that is not part of the result."""
        print(visible(line), file=sys.stderr)

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Show a bar on stderr if it is a terminal; yields advance(done, total)."""
        if not (self.bars and sys.stderr.isatty()):
            yield lambda done, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


def size(count: float) -> str:
    """Format a number of bytes in powers of 1,000: '512 B', '1.5 MB'."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
