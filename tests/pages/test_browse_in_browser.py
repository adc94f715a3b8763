"""`edge-client browse` as its owner uses it: one server, one browser, one life of a gallery."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from nobackfill.client.device import Device
from nobackfill.client.output import Advance, Output
from nobackfill.client.sync import SyncOptions, SyncReport, sync
from nobackfill.plugins.web.browse import app
from nobackfill.plugins.web.browse.app import make_site
from nobackfill.plugins.web.guard import new_token
from nobackfill.plugins.web.listener import Listener
from nobackfill.report.page import RunningPages as Pages
from nobackfill.report.page import upgrade_page
from tests.pages import structure
from tests.support import browser as look
from tests.support import edge
from tests.support.browser import DESKTOP, PHONE, check


class Served:
    """A gallery of 12 images behind its pages, release 2 published for it."""

    def __init__(self, setting: edge.Setting, address: str) -> None:
        self.setting = setting
        self.address = address


@pytest.fixture(scope="module")
def served(
    near_trials: None, world: edge.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    setting = world.setting(tmp_path_factory.mktemp("browse"))
    world.publish(setting.repo, 2)
    token = new_token()
    with Device(setting.gallery) as device, Listener("127.0.0.1", 0) as listener:
        listener.serve(make_site(device, listener.hosts, token))
        yield Served(setting, f"{listener.address}/{token}/")


@pytest.fixture
def page(browser: Browser, served: Served) -> Iterator[Page]:
    with look.tab(browser) as opened:
        yield opened


# Each page's path, and what is there once all of it is.
PAGES = {
    "photos": ("", "12 items"),
    "none that pass": ("?where=name=none", "No item passes"),
    "item": ("item/1", "More like this"),
    "release": ("release", "Would go from release 1 to 2"),
    "least certain": ("uncertain", "No item has an uncertainty"),
}


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_every_page_keeps_its_structure(
    browser: Browser, served: Served, size: tuple[int, int], tmp_path: Path
) -> None:
    """First of all, while the gallery is as it was made."""
    with look.tab(browser, size) as page:
        for name, (path, there) in PAGES.items():
            page.goto(served.address + path)
            expect(page.get_by_text(there).first).to_be_visible()
            check(page, "dark" if size is PHONE else "light")
            structure.same(page, f"browse, {name},", size[0], tmp_path)


def test_a_picture_is_searched_and_walked_through_by_keys(page: Page, served: Served) -> None:
    page.goto(served.address)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Search by a picture")).to_be_focused()
    expect(page.get_by_text("12 items")).to_be_visible()
    expect(page.locator(".tiles .tile")).to_have_count(12)
    loaded = "[...document.images].every(one => one.complete && one.naturalWidth > 0)"
    page.wait_for_function(loaded)
    page.set_input_files("#picture", served.setting.images[3])
    expect(page.get_by_role("heading", name="Nearest to your picture")).to_be_focused()
    first = page.locator("#found .tile").first
    expect(first).to_contain_text(served.setting.images[3].name)
    expect(first).to_contain_text("100.0 %")
    check(page)
    first.focus()
    page.keyboard.press("ArrowRight")
    second = page.locator("#found .tile").nth(1)
    expect(second).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="More like this")).to_be_visible()
    check(page)


def test_dropped_pasted_and_wrong_pictures(page: Page, served: Served) -> None:
    page.goto(served.address)
    bytes_ = list(served.setting.images[5].read_bytes())
    for event, key in (("drop", "dataTransfer"), ("paste", "clipboardData")):
        page.evaluate("document.querySelector('#found').replaceChildren()")
        page.evaluate(
            """([bytes, event, key]) => {
                const transfer = new DataTransfer();
                transfer.items.add(new File([new Uint8Array(bytes)], "q.png", {type: "image/png"}));
                const kind = event === "drop" ? DragEvent : ClipboardEvent;
                const made = new kind(event, {[key]: transfer, bubbles: true});
                document.body.dispatchEvent(made)}""",
            [bytes_, event, key],
        )
        first = page.locator("#found .tile").first
        expect(first).to_contain_text(served.setting.images[5].name)
    note = served.setting.gallery.parent / "note.txt"
    note.write_text("no picture")
    page.set_input_files("#picture", note)
    expect(page.get_by_role("alert")).to_contain_text("That is no picture")


def test_filters_stay_in_the_address(page: Page, served: Served) -> None:
    page.goto(served.address)
    page.get_by_label("Only items whose metadata matches").fill("name=0-0004.png")
    page.get_by_role("button", name="Filter").click()
    expect(page.locator(".tiles .tile")).to_have_count(1)
    check(page)
    page.get_by_role("link", name="remove").click()
    expect(page.locator(".tiles .tile")).to_have_count(12)
    page.go_back()
    expect(page.locator(".tiles .tile")).to_have_count(1)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A sync waits, each time that it has told how far it is, until this is set."""
    goes_on = threading.Event()

    def waiting(device: Device, wishes: SyncOptions, output: Output) -> SyncReport:
        told = output.progress

        @contextmanager
        def progress(what: str) -> Iterator[Advance]:
            with told(what) as advance:

                def then_wait(done: int, total: int) -> None:
                    advance(done, total)
                    goes_on.wait(60)

                yield then_wait

        if not wishes.dry_run:
            object.__setattr__(output, "progress", progress)
        return sync(device, wishes, output)

    monkeypatch.setattr(app, "sync", waiting)
    yield goes_on
    goes_on.set()


def test_a_gallery_is_synced_compared_and_rolled_back(
    page: Page, served: Served, held: threading.Event
) -> None:
    page.goto(f"{served.address}release")
    expect(page.get_by_text("Would go from release 1 to 2")).to_be_visible()
    check(page)
    page.get_by_role("button", name="Sync now").click()
    expect(page.get_by_role("progressbar", name="Sync")).to_be_visible()
    check(page)
    # It has told how far it is, and waits; searches go on meanwhile.
    page.get_by_role("link", name="Photos").click()
    page.set_input_files("#picture", served.setting.images[7])
    expect(page.locator("#found .tile").first).to_contain_text(served.setting.images[7].name)
    page.go_back()
    held.set()
    expect(page.get_by_text("12 items now in release 2's space")).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="The release now").click()
    expect(page.get_by_role("heading", name="Release 2 answers")).to_be_visible()
    page.get_by_role("link", name="Photos").click()
    page.locator(".tile").first.click()
    expect(page.get_by_text("migrated without its image")).to_be_visible()
    expect(page.get_by_text("by the route 1 → 2")).to_be_visible()
    expect(page.get_by_role("heading", name="What changed for this picture")).to_be_visible()
    check(page)
    page.get_by_role("button", name="Re-embed from the file").click()
    expect(page.get_by_text("Re-embedded from its file.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("re-embedded from its file", exact=False).first).to_be_visible()
    page.get_by_role("link", name="Least certain").click()
    expect(page.locator(".tile")).to_have_count(11)
    check(page)
    page.get_by_role("link", name="Release", exact=True).click()
    page.get_by_role("button", name="Return to release 1").click()
    expect(page.get_by_role("heading", name="Release 1 answers")).to_be_visible()
    expect(page.get_by_text("Held back: release 2")).to_be_visible()


def test_a_report_leads_to_the_pages(page: Page, served: Served, tmp_path: Path) -> None:
    console = "http://127.0.0.1:9465"
    report = tmp_path / "upgrade.html"
    told = upgrade_page(served.setting.repo, 2, None, Pages(console, served.address))
    report.write_text(told, encoding="utf-8")
    page.goto(report.as_uri())
    check(page, "light", "dark")
    link = page.get_by_role("link", name="release 2 at the gateway's console")
    expect(link).to_have_attribute("href", f"{console}/release/2")
    page.get_by_role("link", name="its least certain pictures").click()
    expect(page.get_by_role("heading", name="Least certain")).to_be_visible()
