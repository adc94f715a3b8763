"""A real browser for pages: Debian's chromium, driven by playwright; one a test session."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Widths and heights in CSS pixels.
PHONE, DESKTOP = (390, 844), (1280, 900)
# What axe-core looks at beyond its default: the standard that the pages keep.
_RULES = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


@contextmanager
def chromium() -> Iterator[Browser]:
    """Where there is none, tests say so and are skipped; they fail where CI is set."""
    if CHROMIUM is None:
        if os.environ.get("CI"):
            raise RuntimeError("no chromium here; .ci/run installs it")
        pytest.skip("no chromium here: apt-get install chromium")
    player: Playwright
    with sync_playwright() as player:
        # Its sandbox needs rights that containers do not give.
        browser = player.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def tab(browser: Browser, size: tuple[int, int] = DESKTOP) -> Iterator[Page]:
    """A page that nothing of an earlier one is left in. No script may fail, nothing be refused."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="light",
        # axe-core is put into the page, which lets no script in but its own.
        bypass_csp=False,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(15_000)
    said: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            said.append(f"{message.text} ({message.location.get('url', '')[-40:]})")

    page.on("console", heard)
    page.on("pageerror", lambda error: said.append(str(error)))
    yield page
    context.close()
    assert not said, said


def check(page: Page, *schemes: Literal["light", "dark"]) -> None:
    """What every page has to be: without a violation that axe-core sees, in each of the colour
    `schemes` (none: the tab's own), and no wider than its window."""
    # A click may show the text of a page before its stylesheet is applied.
    page.wait_for_load_state("load")
    for scheme in schemes or (None,):
        if scheme is not None:
            page.emulate_media(color_scheme=scheme)
        found = Axe().run(page, options=_RULES)
        assert not found.response["violations"], found.generate_report()
    width = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], f"{page.url}: {width[0]} pixels wide in a window of {width[1]}"
