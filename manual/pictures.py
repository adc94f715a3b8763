"""`make pictures`: what the pages show, drawn anew from a demo's folder.

Debian's chromium opens the demo's reports, the device's gallery and the gateway's console, as
`make demo DEMO_ARGS=--open` does; what is in the pictures is that life's, whichever it was.
"""

import io
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from PIL import Image
from playwright.sync_api import Browser, Page, Playwright, sync_playwright

from demo import pages
from demo.children import Children
from demo.life import lock_folder
from nobackfill.durable import write_file
from nobackfill.errors import NobackfillError, NotFoundError, UnavailableError

# Widths of the windows, in CSS pixels; a page as long as it is.
_LIFE, _UPGRADE, _LIVE = 1020, 900, 1100
# Of a page that is longer than a screen, what is shown.
_SCREEN = 820
# Colours of a picture: enough for digits and charts, at a third of the bytes.
_COLOURS = 128
# Where the searches one by one begin in the report, and where they end.
_SEARCHES = """() => {
    let first = document.querySelector(".group, .least");
    while (first.tagName !== "H2") first = first.previousElementSibling;
    const last = [...document.querySelectorAll("h2")].pop();
    return [first, last].map(one => one.getBoundingClientRect().top + scrollY);
}"""


def draw(life: Path, into: Path) -> Iterator[Path]:
    """Write the pictures of a life into a folder, one by one. Raises NotFoundError where `life` is
    no demo that has ended, or `into` no folder; UnavailableError without a browser, BusyError where
    a demo runs."""
    if not into.is_dir():
        raise NotFoundError(f"{into}: no such folder; make it, or name another with --into")
    for name in ("report.html", "upgrade.html"):
        if not (life / name).is_file():
            raise NotFoundError(f"{life / name}: no such page; run `make demo` to its end first")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        raise UnavailableError("no chromium here: apt-get install chromium")
    player: Playwright
    with lock_folder(life), sync_playwright() as player, Children(life / "logs") as children:
        browser = player.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield from _reports(browser, life, into)
        yield from _live(browser, pages.start_pages(life, children), next(_queries(life)), into)
        browser.close()


def _reports(browser: Browser, life: Path, into: Path) -> Iterator[Path]:
    page = _open(browser, (life / "report.html").as_uri(), _LIFE)
    yield _save(page.screenshot(full_page=True), into / "life.png")
    page = _open(browser, (life / "upgrade.html").as_uri(), _UPGRADE)
    begin, end = page.evaluate(_SEARCHES)
    for name, top, bottom in (("upgrade.png", 0, begin), ("upgrade-searches.png", begin, end)):
        # The line above a heading belongs to what it ends.
        clip = {"x": 0, "y": max(0, top - 8), "width": _UPGRADE, "height": bottom - top - 8}
        yield _save(page.screenshot(full_page=True, clip=clip), into / name)  # type: ignore[arg-type]


def _live(browser: Browser, addresses: dict[str, str], query: Path, into: Path) -> Iterator[Path]:
    page = _open(browser, addresses["the device's gallery"], _LIVE)
    page.set_input_files("#picture", query)
    page.locator("#found .tile").first.wait_for()
    page.locator("#found img").evaluate_all("all => Promise.all(all.map(one => one.decode()))")
    yield _save(page.screenshot(), into / "browse.png")
    page = _open(browser, addresses["the gateway's console"], _LIVE)
    page.get_by_role("link", name="release 2").first.click()
    page.get_by_role("heading", name="Compatibility matrix").wait_for()
    yield _save(page.screenshot(), into / "console.png")


def _open(browser: Browser, address: str, width: int) -> Page:
    page = browser.new_page(
        viewport={"width": width, "height": _SCREEN}, color_scheme="light", reduced_motion="reduce"
    )
    page.goto(address)
    return page


def _queries(life: Path) -> Iterator[Path]:
    return iter(sorted((life / "data" / "queries").glob("*/*")))


def _save(picture: bytes, file: Path) -> Path:
    smaller = io.BytesIO()
    shown = Image.open(io.BytesIO(picture)).convert("RGB").quantize(_COLOURS)
    shown.save(smaller, "PNG", optimize=True)
    write_file(file, smaller.getvalue(), 0o644)
    return file


def command(
    life: Annotated[Path, typer.Option(help="Folder of a finished `make demo`; only read.")] = Path(
        "build/demo"
    ),
    into: Annotated[Path, typer.Option(help="Folder to which the pictures are written.")] = Path(
        "docs"
    ),
) -> None:
    """Draw the pictures of docs/ anew from a demo's folder."""
    try:
        for picture in draw(life.resolve(), into):
            print(f"{picture}: {picture.stat().st_size:,} bytes")
    except NobackfillError as error:
        print(f"pictures: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from error


if __name__ == "__main__":
    typer.run(command)
