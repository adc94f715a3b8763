"""Make training commands, which print an error as one sentence on stderr and exit with its code."""

import functools
import sys
from collections.abc import Callable

import typer

from nobackfill.errors import NobackfillError


def command_app(name: str, main: Callable[..., None], epilog: str) -> typer.Typer:
    """Make a command line of `main`.

    A NobackfillError is printed on stderr as "NAME: sentence", and the command exits with the
    error's exit code; after an interrupt it exits with 130. Other exceptions show a traceback.
    Arguments that typer itself refuses exit with 2. The command has no completion, and its
    parameters and help are those of `main`.

    Args:
        name: the command's name in messages.
        main: the function whose parameters are the options.
        epilog: text below the options in --help.

    Returns:
        The application; call it to run the command with the process's arguments.
    """

    @functools.wraps(main)
    def guarded(*args: object, **options: object) -> None:
        try:
            main(*args, **options)
        except NobackfillError as error:
            print(f"{name}: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command(name, epilog=epilog)(guarded)
    return app
