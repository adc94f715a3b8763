"""The console as an operator uses it: look, activate under load, compare, roll back."""

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from nobackfill.server.gateway import Gateway
from tests.server.conftest import make_stages, publish_stage
from tests.server.support import Client, images, running
from tests.support import browser as look
from tests.support.blocks import png
from tests.support.browser import DESKTOP, PHONE, check

COUNT = 30


@pytest.fixture(scope="module")
def gateway(near_trials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Gallery g of COUNT items in release 1, release 2 published for it."""
    top = tmp_path_factory.mktemp("console")
    stages = make_stages(top, 2)
    shutil.copytree(stages[1], top / "live" / "repo")
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(top / "live" / "repo", top / "data", **given) as gateway:
        with Client(gateway.address) as client:
            client.create_when_idle()
            pictures = {f"i{i}": png(image) for i, image in enumerate(images(COUNT))}
            client.put("g", pictures, {name: {"kind": int(name[1:]) % 3} for name in pictures})
        publish_stage(top / "live" / "repo", stages[2])
        gateway.catalog.refresh()
        yield gateway


@pytest.fixture
def searching(gateway: Gateway) -> Iterator[None]:
    """Somebody searches meanwhile."""
    ended = threading.Event()

    def search() -> None:
        with Client(gateway.address) as client:
            while not ended.wait(0.02):
                client.find(images(1)[0])

    thread = threading.Thread(target=search)
    thread.start()
    yield
    ended.set()
    thread.join()


def test_an_operator_activates_compares_and_rolls_back(
    browser: Browser, gateway: Gateway, searching: None, tmp_path: Path
) -> None:
    picture = tmp_path / "q.png"
    picture.write_bytes(png(images(COUNT)[4]))
    with look.tab(browser) as page:
        page.goto(gateway.console_address)
        expect(page.locator("#live")).to_contain_text("ms")
        expect(page.get_by_text("metadata timestamp")).to_be_visible()
        check(page)
        page.get_by_role("link", name="release 2").click()
        expect(page.get_by_role("heading", name="Who can search what")).to_be_visible()
        row = page.get_by_role("row", name="g 30")
        expect(row).to_contain_text("1 → 2", timeout=60_000)
        check(page)
        page.get_by_label("Rollout").select_option("dual")
        page.get_by_role("button", name="Activate release 2").click()
        done = page.get_by_text("Release 2, rollout dual: done")
        expect(done).to_be_visible(timeout=90_000)
        expect(page.locator("#live")).to_contain_text("30 of 30 items")
        compare(page, gateway, picture)
        page.goto(f"{gateway.console_address}gallery/g?by=kind")
        for kind in range(3):
            expect(
                page.get_by_role("row", name=re.compile(rf"^{kind}(\.0)? 10 0 "))
            ).to_be_visible()
        check(page)
        page.get_by_role("link", name="Rollback").click()
        expect(page.get_by_text("Every item would be found there.")).to_be_visible()
        check(page)
        page.get_by_role("button", name="Return to release 1").click()
        expect(page.get_by_role("row", name=re.compile("^release 1 active"))).to_be_visible()
    assert gateway.state.now.active == 1


def compare(page: Page, gateway: Gateway, picture: Path) -> None:
    """The playground: three columns, the same item first where vectors may meet at all."""
    page.goto(f"{gateway.console_address}playground")
    page.set_input_files("#picture", picture)
    old = page.get_by_role("region", name="release 1 asks its own vectors")
    new = page.get_by_role("region", name="release 2, as it is served")
    expect(new.locator("code").first).to_have_text("i4")
    expect(new.get_by_role("listitem").first).to_contain_text("release 2, upgraded")
    expect(old.locator("code").first).to_have_text("i4")
    expect(old.get_by_role("listitem").first).to_contain_text("release 1, native")
    expect(page.get_by_text("does not declare that its queries may meet")).to_be_visible()
    check(page)


@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (DESKTOP, "dark")])
def test_every_page_at_every_size(
    browser: Browser, gateway: Gateway, size: tuple[int, int], scheme: str, tmp_path: Path
) -> None:
    with look.tab(browser, size, scheme) as page:
        for path in ("", "release/1", "gallery/g", "playground"):
            page.goto(gateway.console_address + path)
            check(page)
            page.screenshot(path=tmp_path / f"{path.replace('/', '-') or 'overview'}.png")
