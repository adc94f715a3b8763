"""Parsers of the words of `edge-client`, and converters of their values."""

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from nobackfill.terminal import escape_control


class _Help(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        # argparse would import shutil, and with it three compressors, for every command.
        columns = os.environ.get("COLUMNS", "")
        with suppress(OSError):
            columns = columns or str(os.get_terminal_size().columns)
        super().__init__(prog, width=int(columns) - 2 if columns.isdecimal() else 78)


class Parser(argparse.ArgumentParser):
    """A parser without abbreviations; errors are one sentence, and help shows true defaults."""

    def __init__(self, *, closing: str = "", **options: Any) -> None:
        """Make a parser.

        Args:
            closing: the last text of its help, printed without wrapping; empty: none.
            options: arguments of argparse.ArgumentParser, except allow_abbrev and formatter_class.
        """
        super().__init__(**options, allow_abbrev=False, formatter_class=_Help)
        self.closing = closing

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an option or argument, as argparse does; append its default to its help.

        "[required]" is appended to a required one. A default of None or False adds nothing.

        Raises:
            KeyError: a default needs to be appended, or the option is required, and it has no help.
            ValueError: as argparse, for options that contradict each other.
        """
        default = options.get("default")
        # Zero is a default too, although it equals False.
        if default is not None and default is not False and default is not argparse.SUPPRESS:
            value = names[0] if options.get("action") is Switch else "%(default)s"
            options["help"] += f" [default: {value}]"
        if options.get("required"):
            options["help"] += " [required]"
        return super().add_argument(*names, **options)

    def format_help(self) -> str:
        """Return the text of --help, which ends with the closing text.

        Lines are as wide as $COLUMNS or the terminal, else 78 columns.
        """
        text = super().format_help().replace("usage:", "Usage:", 1)
        return f"{text}\n{self.closing}" if self.closing else text

    def error(self, message: str) -> NoReturn:
        """Print an error as one sentence on stderr and end the process with exit code 2.

        Control characters in it are made visible.

        Raises:
            SystemExit: always, with code 2.
        """
        self.exit(2, escape_control(f"{self.prog}: {message}; see `{self.prog} --help`") + "\n")


class Command(Parser):
    """The parser of one command; options may stand between positional arguments."""

    # Off for argcomplete, which follows a parser's steps; intermixed parsing reads words twice.
    intermixed: ClassVar[bool] = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, usage="%(prog)s [OPTIONS]")
        self._inside = False

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an option or argument; show a positional argument in the usage line too, in brackets
        where it may be missing.

        Raises:
            KeyError: a default needs to be appended, or the option is required, and it has no help.
            ValueError: as argparse, for options that contradict each other.
        """
        added = super().add_argument(*names, **options)
        if not added.option_strings:
            name = str(added.metavar)
            bare = added.nargs == "+" or name.startswith("[")
            self.usage = f"{self.usage} {name if bare else f'[{name}]'}"
        return added

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the words of a command line; options may stand between positional arguments.

        Args:
            args: the words; None: those of this process.
            namespace: where to store the values; None: a new argparse.Namespace.

        Returns:
            The namespace with the values, and the words that are not known.

        Raises:
            SystemExit: a word cannot be used, with code 2; or --help was printed, with code 0.
        """
        if self._inside or not self.intermixed:
            return super().parse_known_args(args, namespace)
        self._inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._inside = False


# By a command's name: the function that runs it, and the function that adds its options.
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
    """Add no options: for commands that only have --json, which every command gets."""


def named_path(text: str) -> Path:
    """Convert a word of the command line to a path.

    Returns:
        The path as it was written, relative or absolute. Whether it exists is not checked.

    Raises:
        ArgumentTypeError: the word is empty; it would mean the current folder.
    """
    if not text:
        raise argparse.ArgumentTypeError(
            "expected a path, got an empty text; name a file or folder"
        )
    return Path(text)


def integer(least: int, most: int) -> Callable[[str], int]:
    """Make a converter of words of the command line to integers in a range.

    Blanks around a number, a sign and underscores between digits are accepted, as `int` does.

    Args:
        least: the smallest value, included.
        most: the largest value, included.

    Returns:
        A function of a word. It raises ArgumentTypeError if the word is no integer of this range.
    """

    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least} to {most}, got {value}"
            )
        return value

    return number
