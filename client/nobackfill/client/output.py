"""Print results on stdout, as one JSON object or as lines of text; progress bars go to stderr."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from nobackfill.errors import join_few
from nobackfill.terminal import escape_control

Advance = Callable[[int, int], None]


@dataclass(frozen=True)
class Output:
    """Where the results of one command go.

    Attributes:
        as_json: print results as one JSON object instead of lines.
        show_progress: show progress bars on stderr if it is a terminal.
    """

    as_json: bool = False
    show_progress: bool = True

    def print_result(self, answer: Mapping[str, object], *lines: str) -> None:
        """Print the result on stdout: with `as_json` as one JSON object, else as lines.

        With `as_json`, the lines are ignored; otherwise the object is.

        Args:
            answer: the object; its values must be valid in JSON.
            lines: the lines for people; control characters are made visible.

        Raises:
            TypeError: with `as_json`, a value cannot be written as JSON.
            OSError: stdout cannot be written, such as BrokenPipeError.
        """
        if self.as_json:
            print(json.dumps(answer))
            return
        for line in lines:
            print(escape_control(line))

    def print_note(self, line: str) -> None:
        """Print a remark on stderr, in both forms; control characters are made visible.

        Raises:
            OSError: stderr cannot be written.
        """
        print(escape_control(line), file=sys.stderr)

    def print_reasons(self, reason_by_name: Mapping[str, str]) -> None:
        """Print one remark on stderr for each reason, with the names that it applies to.

        Notes come in the order in which each reason first occurs. A note lists three names, and
        counts the others.

        Args:
            reason_by_name: the reason of each name, such as a file; empty prints nothing.

        Raises:
            OSError: stderr cannot be written.
        """
        names_of: dict[str, list[str]] = {}
        for name, reason in reason_by_name.items():
            names_of.setdefault(reason, []).append(name)
        for reason, names in names_of.items():
            self.print_note(f"{join_few(names)}: {reason}")

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        """Show a progress bar for the block, if `show_progress` is set and stderr is a terminal.

        Otherwise the yielded function does nothing. The bar disappears at the end of the block.

        Args:
            what: the text before the bar.

        Yields:
            A function that moves the bar: it takes the count so far, and the total.
        """
        if not (self.show_progress and sys.stderr.isatty()):
            yield lambda count, total: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=None)
            yield lambda count, total: bar.update(task, completed=count, total=total)


def format_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1,000: '512 B', '1.5 MB'.

    Counts of 1,000 GB and more stay in GB. Rounding may give 1000.0 of a smaller unit. Whole bytes
    have no decimal place, other units one.
    """
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
