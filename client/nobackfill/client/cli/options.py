"""How the words of `edge-client` are read: its parsers, and kinds of values."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from nobackfill.terminal import visible


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        # argparse itself would load shutil, and with it three compressors, for each command.
        columns = os.environ.get("COLUMNS", "")
        with suppress(OSError):
            columns = columns or str(os.get_terminal_size().columns)
        super().__init__(prog, width=int(columns) - 2 if columns.isdecimal() else 78)


class Parser(argparse.ArgumentParser):
    """Reads words without abbreviations; an error is one sentence, help has the true defaults."""

    def __init__(self, *, closing: str = "", **options: Any) -> None:
        """`closing`: text that help ends with, line by line as it stands."""
        super().__init__(**options, allow_abbrev=False, formatter_class=_Help)
        self.closing = closing

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an option or argument; its default is put into its help."""
        default = options.get("default")
        # Zero is a default, too, and equal to False.
        if default is not None and default is not False and default is not argparse.SUPPRESS:
            shown = names[0] if options.get("action") is Switch else "%(default)s"
            options["help"] += f" [default: {shown}]"
        if options.get("required"):
            options["help"] += " [required]"
        return super().add_argument(*names, **options)

    def format_help(self) -> str:
        """The text of --help."""
        text = super().format_help().replace("usage:", "Usage:", 1)
        return f"{text}\n{self.closing}" if self.closing else text

    def error(self, message: str) -> NoReturn:
        """End the process with exit code 2."""
        self.exit(2, visible(f"{self.prog}: {message}; see `{self.prog} --help`") + "\n")


class Command(Parser):
    """The parser of one command: its options may stand between its names."""

    # argcomplete looks at the steps of a parser, which reads the words twice otherwise.
    intermixed: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, usage="%(prog)s [OPTIONS]")
        self._inside = False

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an option or argument; an argument is named in the usage."""
        added = super().add_argument(*names, **options)
        if not added.option_strings:
            name = str(added.metavar)
            bare = added.nargs == "+" or name.startswith("[")
            self.usage = f"{self.usage} {name if bare else f'[{name}]'}"
        return added

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Read words, options between names too."""
        if self._inside or not self.intermixed:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


# What a command does, and what adds its options to its parser, by its name.
Commands = Mapping[str, tuple[Callable[[argparse.Namespace], None], Callable[[Command], None]]]


class Switch(argparse.Action):
    """An option with two names: the first sets True, the second False."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: Any,
        values: object,
        name: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, name == self.option_strings[0])


def no_options(command: Command) -> None:
    """Only --json, which every command has."""


def named_path(text: str) -> Path:
    """A path of the command line; an empty name would mean the folder one is in."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty name")
    return Path(text)


def whole(least: int, most: int) -> Callable[[str], int]:
    """Whole numbers from `least` to `most`."""

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{value} is not in the range {least} to {most}")
        return value

    return number
