"""`make demo`: the whole life of an embedding, on real data, with every real component.

Kill it at any moment and start it again: finished steps are kept.
"""

import contextlib
import fcntl
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from demo import page, pages, summary
from demo.children import Children
from demo.gateways import Store
from demo.journal import Journal
from demo.screen import Screen
from demo.steps import Life, Options
from nobackfill.errors import BusyError, CannotWriteError, NobackfillError

Rollout = Literal["cutover", "dual", "direct"]


def run_life(options: Options, *, stay: bool) -> None:
    """Run every step that is not done yet, then write and show the reports."""
    journal = Journal(options.out / "journal.json", options.as_kept())
    with Children(options.out / "logs") as children:
        screen = Screen()
        steps = Life(options, children, journal, screen).steps()
        screen.steps = len(steps)
        for name, title, work in steps:
            if name in journal:
                screen.skip(title)
                continue
            start = time.monotonic()
            with screen.step(title):
                result = work()
            journal.finish(name, result, time.monotonic() - start)
    figures = summary.make_report(journal)
    (options.out / "report.json").write_text(json.dumps(figures, indent=2), encoding="utf-8")
    report = page.write_report(options.out, figures, options.seed)
    summary.print_report(figures)
    print(f"\nPictures: {report}, {options.out}/upgrade.html")
    print(f"Figures:  {options.out}/report.json; begin anew with --fresh or another --out")
    if stay:
        serve_pages(options, figures)
    else:
        print(f"Look at this life: {report.as_uri()}")


def serve_pages(options: Options, figures: dict[str, Any]) -> None:
    """Keep the life's pages open until Ctrl-C, the report with links to all of them."""
    try:
        with Children(options.out / "logs") as children:
            links = pages.start_pages(options.out, children, options.store)
            report = page.write_report(options.out, figures, options.seed, links)
            for what, address in links.items():
                print(f"{what}: {address}")
            print(f"Look at this life, until Ctrl-C: {report.as_uri()}", flush=True)
            pages.wait_for_interrupt()
    finally:
        # Nobody answers at the addresses any more, however this ends.
        page.write_report(options.out, figures, options.seed)


@contextlib.contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    """Hold the folder for one run. Raises BusyError where another run holds it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / "lock").open("w")
    except OSError as error:
        raise CannotWriteError(f"--out {out}: cannot be written ({error.strerror})") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BusyError(f"another demo is running in {out}; wait for its end") from error
        yield


def command(
    out: Annotated[
        Path,
        typer.Option(
            help="Folder to which everything is written: models, releases, galleries and logs; an "
            "interrupted run in it goes on."
        ),
    ] = Path("build/demo"),
    images: Annotated[
        Path | None,
        typer.Option(
            help="Folder with your own images, one folder in it for each class; it is only read. "
            "Without it, the demo uses scanned digits."
        ),
    ] = None,
    rollout: Annotated[
        Rollout,
        typer.Option(
            help="How the gateway changes to release 2: cutover after the whole gallery is "
            "upgraded, dual with both models until then, or direct without an upgrade."
        ),
    ] = "cutover",
    store: Annotated[
        Store,
        typer.Option(
            help="Where the gallery is stored: sqlite, one file of one gateway, or postgresql, a "
            "database of two gateways that Ray upgrades while one of them is killed."
        ),
    ] = "sqlite",
    seed: Annotated[
        int,
        typer.Option(
            min=0, help="Seed of the random numbers that divide the images and start each training."
        ),
    ] = 0,
    image_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=224,
            help="Side of the square images that the models read, in pixels.",
            show_default="that of the pictures",
        ),
    ] = None,
    epochs: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of epochs of every training.",
            show_default="as in configs/digits",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of images in each training step; with few images use a small number.",
            show_default="as in configs/digits",
        ),
    ] = None,
    images_per_class: Annotated[
        int | None,
        typer.Option(
            min=13, help="Largest number of images of each class to use.", show_default="all"
        ),
    ] = None,
    clients: Annotated[
        int,
        typer.Option(
            min=1, max=64, help="Number of clients that search while the gateway changes the model."
        ),
    ] = 4,
    steady_seconds: Annotated[
        float,
        typer.Option(
            min=0.5, help="Seconds for which the clients search before and after the change."
        ),
    ] = 6,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Publish releases even if they do not pass their gate. Without this flag, the "
            "demo ends with the gate's table.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Delete an earlier run in the folder of --out first. Without this flag, an "
            "unfinished run resumes.",
        ),
    ] = False,
    stay: Annotated[
        bool,
        typer.Option(
            "--open",
            help="Serve the gallery and the console at the end until Ctrl-C, and print their "
            "addresses. Without this flag, the demo ends after its table.",
        ),
    ] = False,
) -> None:
    """Train, publish, serve, hot-swap and upgrade, with a table at the end."""
    options = Options(
        out=out.resolve(),
        images=images.resolve() if images else None,
        rollout=rollout,
        store=store,
        seed=seed,
        image_size=image_size,
        epochs=epochs,
        batch_size=batch_size,
        images_per_class=images_per_class,
        clients=clients,
        steady_seconds=steady_seconds,
        force=force,
    )
    with lock_folder(options.out):
        if fresh and (options.out / "journal.json").exists():
            for path in options.out.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
        run_life(options, stay=stay)


def main() -> None:
    """Run the command line; a failure is one sentence on stderr and its exit code."""
    # Leaving through SystemExit ends the children, as an interrupt does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    try:
        app()
    except NobackfillError as error:
        print(f"demo: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
