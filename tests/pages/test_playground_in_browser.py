"""The playground where releases read texts: asked by a text and by a picture, side by side."""

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from playwright.sync_api import Browser, Page, expect

from nobackfill.server.gateway import GatewayServer
from tests.pages import structure
from tests.server.support import Client, images, running
from tests.server.test_texts import published
from tests.support import browser as look
from tests.support.blocks import png
from tests.support.browser import DESKTOP, PHONE, check

COUNT = 12


@pytest.fixture(scope="module")
def gateway(near_trials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """Gallery `both` of COUNT pictures in release 2, carried from release 1."""
    top = tmp_path_factory.mktemp("playground")
    published(top / "repo", 1, "both")
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(top / "repo", top / "data", **given) as gateway:
        with Client(gateway.address) as client:
            client.create_gallery("both")
            assert not client.put(
                "both", {f"i{n}": png(image) for n, image in enumerate(images(20)[:COUNT])}, {}
            )
            published(top / "repo", 2, "both")
            gateway.catalog.refresh()
            list(client.activate(2))
        yield gateway


def first(page: Page, title: str) -> str:
    """Of the column with this title."""
    column = page.get_by_role("region", name=title)
    return column.locator("code").first.inner_text()


def test_a_text_is_asked_of_old_and_new(
    browser: Browser, gateway: GatewayServer, tmp_path: Path
) -> None:
    """The word w3 lies where the third picture does."""
    picture = tmp_path / "q.png"
    picture.write_bytes(png(images(20)[5]))
    columns = ("release 1 searches its own vectors", "release 2, as it is served")
    for size in (DESKTOP, PHONE):
        with look.tab(browser, size) as page:
            page.goto(f"{gateway.console_address}playground")
            structure.same(page, "console, playground with texts,", size[0], tmp_path)
            check(page, "dark" if size is PHONE else "light")
            page.get_by_label("A text; it is not stored").fill("w3")
            page.keyboard.press("Enter")
            expect(page.get_by_role("heading", name="Side by side")).to_be_focused()
            assert [first(page, title) for title in columns] == ["i3", "i3"]
            expect(page.get_by_text("so its queries never meet these vectors")).to_be_visible()
            check(page)
            page.set_input_files("#picture", picture)
            expect(page.get_by_role("region", name=columns[1]).locator("code").first).to_have_text(
                "i5"
            )
            page.get_by_label("A text; it is not stored").fill("w7")
            page.get_by_role("button", name="Search by text").click()
            expect(page.get_by_role("region", name=columns[0]).locator("code").first).to_have_text(
                "i7"
            )


def test_what_is_no_text_gets_a_sentence(gateway: GatewayServer) -> None:
    at = gateway.console_address
    origin = at.split("/", 3)
    with httpx2.Client(headers={"Origin": f"{origin[0]}//{origin[2]}"}, timeout=30) as client:
        plain = {"Content-Type": "text/plain; charset=utf-8"}
        for body in (b"\xff\xfe", b"", b"  ", b"w1 " * 200_000):
            asked = client.post(f"{at}playground/search?gallery=both", content=body, headers=plain)
            assert asked.status_code in (413, 422), asked.text
            assert asked.text.count('role="alert"') == 1


def test_where_a_release_reads_texts_alone_no_picture_is_asked_for(
    browser: Browser, near_trials: None, tmp_path: Path
) -> None:
    published(tmp_path / "repo", 1, "texts")
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(tmp_path / "repo", tmp_path / "data", **given) as gateway:
        with Client(gateway.address) as client:
            client.create_gallery("notes")
            assert not client.put_texts("notes", {f"n{n}": f"w{n}" for n in range(5)})
        with look.tab(browser) as page:
            page.goto(f"{gateway.console_address}playground")
            expect(page.locator("#picture")).to_have_count(0)
            page.get_by_label("A text; it is not stored").fill("w4")
            page.keyboard.press("Enter")
            expect(
                page.get_by_role("region", name="release 1, as it is served").locator("code").first
            ).to_have_text("n4")
            page.get_by_label("A text; it is not stored").fill("   ")
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert")).to_contain_text("Expected a text")
