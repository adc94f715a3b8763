"""The command `edge-client`: its parser, its exit codes, and how a command ends that is refused.

Modules that do the work are imported inside the commands, so that a search does not wait for
libraries that only a sync needs.
"""

import argparse
import errno
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from nobackfill.client.cli import galleries, releases
from nobackfill.client.cli.options import Command, Parser, named_path
from nobackfill.errors import CannotWriteError, InvalidInputError, NobackfillError
from nobackfill.terminal import visible

_CLOSING = """\
A gallery's life; only init, sync, push and pull need a network:
  edge-client init --from grpc://127.0.0.1:50051 --root 1.root.json
  edge-client add photos
  edge-client search photos/a.jpg
  edge-client sync

sync follows the newest release, also over releases that this device skipped.
1.root.json lies in the publication folder: get it from the publisher, another way
than the releases. Another gallery: edge-client --gallery FILE COMMAND. Whatever
was interrupted: run it again. Every COMMAND has its own --help.

Exit codes: 0 done, 1 failure, 2 wrong usage, 65 refused data or failed
verification, 66 no such file, item or release, 69 server unavailable, 73 cannot
write, 75 busy, try again, 77 not permitted, 78 configuration, 130 interrupted.
"""
# Met outside the modules that write: the folder of a command's own output, say.
_NO_NAMES = (errno.ENAMETOOLONG, errno.ELOOP, errno.EILSEQ)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT)


def main() -> None:
    """Run the command line of this process."""
    # Nothing of what a search makes is garbage before its end.
    if "search" in sys.argv[1:4]:
        gc.disable()
    run_line()


def run_line(line: Sequence[str] | None = None) -> NoReturn:
    """Run a command line, by default that of this process, and exit with its code.

    A refusal becomes one sentence on stderr and its exit code.
    """
    with _refusing():
        if "_ARGCOMPLETE" in os.environ:
            _complete()
        words = sys.argv[1:] if line is None else line
        parser = edge_client(words)
        if not words:
            parser.print_help(sys.stderr)
            sys.exit(2)
        arguments = parser.parse_args(words)
        arguments.run(arguments)
        # There is no sys.stdout where the caller closed it.
        print(end="", flush=True)
        sys.exit(0)


def edge_client(words: Sequence[str] = ()) -> Parser:
    """Make the parser of the command line.

    `words`: what is typed. The parser gets only the commands among them, if there are any: a search
    does not wait for the options of the others.
    """
    parser = Parser(
        prog="edge-client",
        usage="%(prog)s [OPTIONS] COMMAND ...",
        description="Keep an image gallery in one file that follows new models without its images.",
        closing=_CLOSING,
    )
    parser.add_argument(
        "--gallery",
        type=named_path,
        default=Path(os.environ.get("NOBACKFILL_GALLERY") or "gallery.sqlite"),
        metavar="FILE",
        help="The gallery's SQLite file; the variable NOBACKFILL_GALLERY names another.",
    )
    parser.add_argument("--version", action=_Do, const=_print_version, default=False,
                        help="Print the version.")  # fmt: skip
    parser.add_argument("--install-completion", action=_Do, const=_install_completion,
                        help="Set up the completion of your shell: bash, zsh or fish.")  # fmt: skip
    parser.add_argument("--show-completion", action=_Do, const=_print_completion,
                        help="Print what sets it up.")  # fmt: skip
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", prog="edge-client", parser_class=Command, required=True
    )
    known = {**galleries.COMMANDS, **releases.COMMANDS}
    names = dict.fromkeys(name for name in words if name in known)
    if not names or words[0] in ("-h", "--help"):
        names = dict.fromkeys(known)
    for name in names:
        command, options = known[name]
        text = command.__doc__ or ""
        story, text = (" ".join(part.split()) for part in (text.partition("\n\n")[0], text))
        one = commands.add_parser(name, help=story, description=text)
        options(one)
        one.add_argument("--json", action="store_true", help="Print one JSON object on stdout.")
        one.set_defaults(run=command, refuse=one.error)
    return parser


class _Do(argparse.Action):
    """An option that does one thing in place of a command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        self.const()
        parser.exit()


def _complete() -> NoReturn:
    """Answer a shell that asks which words may come next; argcomplete ends the process."""
    import argcomplete

    Command.intermixed = False
    argcomplete.autocomplete(edge_client())
    sys.exit()


def _print_version() -> None:
    from importlib.metadata import version

    print(version("nobackfill"))


def _completion() -> tuple[str, str]:
    """The name of the user's shell, and what it reads to complete the words of a command line."""
    from argcomplete.shell_integration import shellcode

    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in ("bash", "zsh", "fish"):
        raise InvalidInputError(
            f"expected $SHELL to be bash, zsh or fish, got {shell!r}; run it as "
            "`SHELL=bash edge-client --show-completion`"
        )
    return shell, shellcode(["edge-client"], shell=shell)


def _print_completion() -> None:
    print(_completion()[1])


def _install_completion() -> None:
    """Write what the shell reads; bash and zsh get a line in their startup file that names it."""
    shell, code = _completion()
    home = Path.home()
    if shell == "fish":
        file = home / ".config" / "fish" / "completions" / "edge-client.fish"
    else:
        file = home / ".local" / "share" / "nobackfill" / f"edge-client.{shell}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code, encoding="utf-8")
    print(f"{file}: written; open another {shell} to use it")
    if shell != "fish":
        startup, line = home / f".{shell}rc", f"source '{file}'\n"
        before = startup.read_text(encoding="utf-8") if startup.exists() else ""
        if line not in before:
            gap = "" if before.endswith("\n") or not before else "\n"
            startup.write_text(f"{before}{gap}{line}", encoding="utf-8")
            print(f"{startup}: reads it from now on")


@contextmanager
def _refusing() -> Iterator[None]:
    """A refusal becomes one sentence on stderr and its exit code."""
    # gRPC's core would print lines of its own; what they mean is in the errors.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        yield
    except NobackfillError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Who reads the answer has gone; what is left of it goes nowhere, without a word.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UnicodeEncodeError as error:
        _refuse(InvalidInputError(f"{error.object[:80]!r}: expected UTF-8 text; rename it"))
    except OSError as error:
        if error.errno in _NO_NAMES:
            _refuse(InvalidInputError(f"{str(error.filename)[:80]}…: {error.strerror}"))
        if error.errno not in _NOT_WRITABLE:
            raise
        named = f"{error.filename}: " if error.filename else ""
        _refuse(CannotWriteError(f"{named}{error.strerror}; free some space, or get the right to"))


def _refuse(error: NobackfillError) -> NoReturn:
    print(visible(f"edge-client: {error}"), file=sys.stderr)
    sys.exit(error.exit_code)
