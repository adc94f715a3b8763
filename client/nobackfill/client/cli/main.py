"""The command `edge-client`: its parser and its exit codes.

Commands import the modules that do their work, so that a search does not wait for libraries that
only a sync needs.
"""

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from nobackfill.client.cli import galleries, releases
from nobackfill.client.cli.options import Command, Parser, named_path
from nobackfill.errors import InvalidInputError, NobackfillError, error_from_os
from nobackfill.terminal import escape_control

_CLOSING = """\
Examples:
  edge-client init --from grpc://127.0.0.1:50051 --root 1.root.json
  edge-client add photos
  edge-client search photos/a.jpg
  edge-client sync
  edge-client status

A release is one published version of the models. sync upgrades to the newest one,
and may skip releases in between. Only init, sync, report, push and pull need a
network. 1.root.json, the keys to trust, lies in the publication folder: get it from
the publisher by another way than the releases. Every command can be run again after
an interruption. `edge-client COMMAND --help` lists options.

Exit codes: 0 done, 1 failure, 2 wrong usage, 65 an image that is missing or refused,
or failed verification, 66 no such gallery, item or release, 69 server unavailable,
73 cannot write, 75 busy, try again, 77 not permitted, 78 wrong configuration,
130 interrupted.
"""


def main() -> None:
    """Run `edge-client` with the words of this process, and exit with the command's code.

    A process that searches runs without Python's garbage collector.

    Raises:
        SystemExit: always, with the exit code, unless OSError is raised.
        OSError: the operating system refuses something else than a name, a permission or space.
    """
    # A search makes no garbage worth collecting before it ends.
    if "search" in sys.argv[1:4]:
        gc.disable()
    run_line()


def run_line(line: Sequence[str] | None = None) -> NoReturn:
    """Run a command line of `edge-client` and exit with its code.

    An error is printed as one sentence on stderr. Sets GRPC_VERBOSITY for this process unless it is
    set. Without words, the help is printed on stderr, and the code is 2. An interrupt gives 130,
    and a closed stdout 1.

    Args:
        line: the words after the program's name; None: those of this process.

    Raises:
        SystemExit: with code 0, or that of the error's class, unless OSError is raised.
        OSError: the operating system refuses something else than a name, a permission or space.
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
        # sys.stdout is None if the caller closed it.
        print(end="", flush=True)
        sys.exit(0)


def edge_client(words: Sequence[str] = ()) -> Parser:
    """Make the parser of `edge-client`.

    Args:
        words: the words of the command line. The parser has only the commands among them, if there
            are any, so that a search does not wait for the options of other commands. Without
            words, it has all.

    Returns:
        A parser. A namespace that it returns has `run`, the function of the command, and `refuse`,
        which ends the process with a usage error. $NOBACKFILL_GALLERY is the default of `gallery`.
    """
    parser = Parser(
        prog="edge-client",
        usage="%(prog)s [OPTIONS] COMMAND ...",
        description="Keep an image gallery in one file, and upgrade it without its images.",
        closing=_CLOSING,
    )
    parser.add_argument(
        "--gallery",
        type=named_path,
        default=Path(os.environ.get("NOBACKFILL_GALLERY") or "gallery.sqlite"),
        metavar="FILE",
        help="SQLite file of the gallery, which is read and written; init makes it. The "
        "environment variable NOBACKFILL_GALLERY names another one.",
    )
    parser.add_argument("--version", action=_Do, const=_print_version, default=False,
                        help="Print the version of nobackfill, and run no command.")  # fmt: skip
    parser.add_argument("--install-completion", action=_Do, const=_install_completion,
                        help="Write the completion script of your shell into your home folder, and "
                        "run no command. $SHELL names the shell: bash, zsh or fish.")  # fmt: skip
    parser.add_argument("--show-completion", action=_Do, const=_print_completion,
                        help="Print the completion script of your shell, and run no command. "
                        "$SHELL names the shell: bash, zsh or fish.")  # fmt: skip
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", prog="edge-client", parser_class=Command, required=True
    )
    every = {**galleries.COMMANDS, **releases.COMMANDS}
    names = dict.fromkeys(name for name in words if name in every)
    if not names or words[0] in ("-h", "--help"):
        names = dict.fromkeys(every)
    for name in names:
        command, options = every[name]
        text = command.__doc__ or ""
        story, text = (" ".join(part.split()) for part in (text.partition("\n\n")[0], text))
        # Only programmers read the sections after the story.
        one = commands.add_parser(name, help=story, description=text.partition(" Args: ")[0])
        options(one)
        one.add_argument(
            "--json",
            action="store_true",
            help="Print one JSON object on stdout. Without this, print readable text.",
        )
        # Accepted after the command, too; without a default, which would replace the one before it.
        one.add_argument(
            "--gallery", type=named_path, default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
        one.set_defaults(run=command, refuse=one.error)
    return parser


class _Do(argparse.Action):
    """An option that runs an action in place of a command."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        self.const()
        parser.exit()


def _complete() -> NoReturn:
    """Answer a shell's request for completions; argcomplete ends the process."""
    import argcomplete

    Command.intermixed = False
    argcomplete.autocomplete(edge_client())
    sys.exit()


def _print_version() -> None:
    from importlib.metadata import version

    print(version("nobackfill"))


def _completion() -> tuple[str, str]:
    """Return the name of the user's shell and its completion script."""
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
    """Write the completion script; bash and zsh also get a line in their startup file."""
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
        text = startup.read_text(encoding="utf-8") if startup.exists() else ""
        if line not in text:
            gap = "" if text.endswith("\n") or not text else "\n"
            startup.write_text(f"{text}{gap}{line}", encoding="utf-8")
            print(f"{startup}: loads the completion from now on")


@contextmanager
def _refusing() -> Iterator[None]:
    """Turn an error into one sentence on stderr and its exit code."""
    # gRPC's core prints lines of its own; the errors carry the same information.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        yield
    except NobackfillError as error:
        _refuse(error)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader of stdout has ended: discard further output silently.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except UnicodeEncodeError as error:
        _refuse(
            InvalidInputError(f"{error.object[:80]!r}: expected a name in UTF-8; rename the file")
        )
    except OSError as error:
        translation = error_from_os(error)
        if translation is None:
            raise
        _refuse(translation)


def _refuse(error: NobackfillError) -> NoReturn:
    print(escape_control(f"edge-client: {error}"), file=sys.stderr)
    sys.exit(error.exit_code)
