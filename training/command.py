"""Running a training command: one place turns errors into a sentence on stderr and an exit code."""

import functools
import sys
from collections.abc import Callable

import typer

from release.errors import NobackfillError


def run_command(name: str, main: Callable[..., None], epilog: str) -> None:
    """Run `main` as a command line and exit with the code of design.md section 7."""

    @functools.wraps(main)
    def guarded(*args: object, **options: object) -> None:
        try:
            main(*args, **options)
        except NobackfillError as error:
            print(f"{name}: {error}", file=sys.stderr)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            raise typer.Exit(130) from error

    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(epilog=epilog)(guarded)
    app(prog_name=name)
