"""The console as an operator uses it: look, activate under load, compare, roll back."""

import hashlib
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from nobackfill.digests import is_in_share, share_digest
from nobackfill.errors import UnavailableError
from nobackfill.gallery.filters import Scalar
from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2
from nobackfill.v1 import release_pb2 as pb
from tests.pages import structure
from tests.server.conftest import publish_stage, stages_of_run
from tests.server.support import Client, embedding, images, running
from tests.support import browser as look
from tests.support.blocks import png
from tests.support.browser import DESKTOP, PHONE, check

COUNT = 30
# Where pictures of hits are: nobody's, but the browser's requests for them are answered.
PICTURES = "https://pictures.example"


def note(number: int) -> dict[str, Scalar]:
    """An item's metadata; half of them say where their picture is."""
    kind: dict[str, Scalar] = {"kind": number % 3}
    return kind if number % 2 else kind | {"image_url": f"{PICTURES}/own/i{number}.png"}


@pytest.fixture(scope="module")
def gateway(near_trials: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """Gallery g of COUNT items in release 1, release 2 published for it."""
    top = tmp_path_factory.mktemp("console")
    stages = stages_of_run(tmp_path_factory)
    shutil.copytree(stages[1], top / "live" / "repo")
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(top / "live" / "repo", top / "data", **given) as gateway:
        with Client(gateway.address) as client:
            client.create_when_idle()
            pictures = {f"i{i}": png(image) for i, image in enumerate(images(COUNT))}
            client.put("g", pictures, {name: note(int(name[1:])) for name in pictures})
        publish_stage(top / "live" / "repo", stages[2])
        gateway.catalog.refresh()
        yield gateway


@pytest.fixture
def searching(gateway: GatewayServer) -> Iterator[None]:
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


# Each page's path, and what is there once all of it is.
PAGES = {
    "overview": ("", "What expires"),
    "first release": ("release/1", "an older release"),
    "next release": ("release/2", "MB of memory"),
    "gallery": ("gallery/g?by=kind", "first hit right"),
    "playground": ("playground", "A picture: drop it"),
}


@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_every_page_keeps_its_structure(
    browser: Browser, gateway: GatewayServer, size: tuple[int, int], tmp_path: Path
) -> None:
    """First of all, before there was a swap."""
    with look.tab(browser, size) as page:
        for name, (path, there) in PAGES.items():
            page.goto(gateway.console_address + path)
            expect(page.get_by_text(there).first).to_be_visible()
            check(page, "dark" if size is PHONE else "light")
            structure.same(page, f"console, {name},", size[0], tmp_path)


def test_an_operator_activates_compares_and_rolls_back(
    browser: Browser, gateway: GatewayServer, searching: None, tmp_path: Path
) -> None:
    picture = tmp_path / "q.png"
    picture.write_bytes(png(images(COUNT)[4]))
    with look.tab(browser) as page:
        page.goto(gateway.console_address)
        expect(page.locator("#live")).to_contain_text("ms")
        expect(page.get_by_text("metadata timestamp")).to_be_visible()
        check(page)
        page.get_by_role("link", name="release 2").click()
        expect(page.get_by_role("heading", name="Compatibility matrix")).to_be_visible()
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
        with Client(gateway.address) as client:
            # Of a client with release 2 on board, who sends no image: the old model embeds none.
            made = embedding(gateway.catalog.manifest(2), images(1)[0])
            late = gallery_pb2.PutItem(id="late", vectors=gallery_pb2.Vectors(embedding=made))
            assert not client.put_items("g", [late])
            page.get_by_role("link", name="Rollback").click()
            expect(page.get_by_text("1 items have no vector")).to_be_visible()
            expect(page.get_by_role("listitem").filter(has_text="g: late")).to_be_visible()
            check(page)
            client.delete("g", ["late"])
        page.reload()
        expect(page.get_by_text("Every item has a vector in its space.")).to_be_visible()
        page.get_by_role("button", name="Return to release 1").click()
        expect(page.get_by_role("row", name=re.compile("^release 1 active"))).to_be_visible()
    assert gateway.state.current.active == 1


def compare(page: Page, gateway: GatewayServer, picture: Path) -> None:
    """The playground: three columns, the same item first where vectors may meet at all."""
    asked: list[str] = []

    def answer(route: Route) -> None:
        asked.append(route.request.url.removeprefix(PICTURES))
        route.fulfill(body=picture.read_bytes(), content_type="image/png")

    page.route(f"{PICTURES}/**", answer)
    page.goto(f"{gateway.console_address}playground")
    page.get_by_label("Where pictures of hits are").fill(PICTURES + "/{kind}/{id}.png")
    page.set_input_files("#picture", picture)
    old = page.get_by_role("region", name="release 1 searches its own vectors")
    new = page.get_by_role("region", name="release 2, as it is served")
    expect(new.locator("code").first).to_have_text("i4")
    expect(new.get_by_role("listitem").first).to_contain_text("release 2, upgraded")
    expect(old.locator("code").first).to_have_text("i4")
    expect(old.get_by_role("listitem").first).to_contain_text("release 1, native")
    expect(page.get_by_text("so its queries never meet these vectors")).to_be_visible()
    expect(new.locator("li img")).to_have_count(10)
    page.wait_for_function("[...document.images].every(one => one.naturalWidth > 0)")
    found = [int(name[1:]) for name in new.locator("code").all_inner_texts()]
    wanted = {f"/{n % 3}/i{n}.png" if n % 2 else f"/own/i{n}.png" for n in found}
    assert wanted <= set(asked)
    check(page)


def test_a_canary_is_watched_live_until_it_stops(
    browser: Browser, gateway: GatewayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both pairs answered, and, once the new one's model is broken, why it was stopped."""
    sessions = [f"session {n}" for n in range(20)]
    by_new = sum(is_in_share(share_digest(2, session), 0.5) for session in sessions)
    with look.tab(browser) as page, Client(gateway.address) as client:
        page.goto(gateway.console_address)
        reports = client.activate(2, canary=pb.Canary(share=0.5))
        next(report for report in reports if report.phase == pb.PHASE_CANARY)
        for session in sessions:
            found = client.search("g", image=png(images(1)[0]), session=session)
            assert client.feedback("g", found.request_id, "i0", "confirmed")
        panel = page.get_by_role("region", name="canary")
        expect(panel).to_contain_text("It answers 50 % of the callers")
        expect(panel).to_contain_text("Overlap of both answers100.0 %")
        expect(panel).to_contain_text("Rank correlation1.000")
        counts = f"{len(sessions) - by_new} {by_new}"
        for row in ("queries", "callers", "of them approved a hit"):
            expect(panel.get_by_role("row", name=f"{row} {counts}", exact=True)).to_be_visible()
        for row in ("failed", "empty answers", "of them rejected a hit"):
            expect(panel.get_by_role("row", name=f"{row} 0 0", exact=True)).to_be_visible()
        for row in ("99 % within", "half answered within", "score of the first hit"):
            figures = re.compile(rf"{row} [\d.]+ (ms|%) [\d.]+ (ms|%)")
            expect(panel.get_by_role("row", name=figures)).to_be_visible()
        check(page, "light")
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        check(page, "dark")
        embed = gateway.models.embed_images

        def broken(manifest: Manifest, pictures: Any) -> Any:
            if manifest.release == 2:
                raise UnavailableError("the model of release 2 is broken")
            return embed(manifest, pictures)

        monkeypatch.setattr(gateway.models, "embed_images", broken)
        stopped = page.get_by_role("heading", name="Canary of release 2: stopped")
        for n in range(500):
            assert client.search("g", image=png(images(1)[0]), session=f"{n}").hits[0].id == "i0"
            if gateway.state.current.activation is None:
                break
        expect(stopped).to_be_visible()
        expect(panel).to_contain_text(
            "queries failed with the new release where the old one answers"
        )


def test_one_logs_in_and_sees_what_the_role_may(
    browser: Browser, near_trials: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A canary is not for readers to watch; callers are chosen by the names of their tokens."""
    stages = stages_of_run(tmp_path_factory)
    shutil.copytree(stages[1], tmp_path / "repo")
    roles = {"operator": "admin", **dict.fromkeys(("ann", "ben", "carl", "dan"), "reader")}
    lines = [f"{n} {role} {hashlib.sha256(n.encode()).hexdigest()}\n" for n, role in roles.items()]
    (tmp_path / "tokens").write_text("".join(lines))
    given = {"console": True, "console_address": "127.0.0.1:0", "tokens_file": tmp_path / "tokens"}
    with (
        running(tmp_path / "repo", tmp_path / "data", **given) as guarded,
        Client(guarded.address, token="operator") as operator,
        look.tab(browser) as page,
    ):
        operator.create_when_idle()
        operator.put_images(images(3))
        publish_stage(tmp_path / "repo", stages[2])
        guarded.catalog.refresh()
        reports = operator.activate(2, canary=pb.Canary(share=0.5))
        next(report for report in reports if report.phase == pb.PHASE_CANARY)
        for name in roles:
            with Client(guarded.address, token=name) as client:
                wanted = 2 if is_in_share(share_digest(2, name), 0.5) else 1
                assert {client.find(images(1)[0]).release for _ in range(3)} == {wanted}
        page.goto(guarded.console_address)
        check(page, "light", "dark")
        for name, panels in (("ann", 0), ("operator", 1)):
            expect(page.get_by_role("heading", name="Log in")).to_be_visible()
            page.get_by_label("Your token of this gateway").fill(name)
            page.keyboard.press("Enter")
            expect(page.get_by_role("link", name="g", exact=True)).to_be_visible()
            expect(page.get_by_role("region", name="canary")).to_have_count(panels)
            page.get_by_role("button", name="Log out").click()
