"""A session's cookie stays with the console: other ports of its host never see it."""

import hashlib
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.server.conftest import stages_of_run
from tests.server.support import Client, images, running
from tests.support import browser as look
from tests.support.blocks import png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until


def test_a_picture_of_another_port_gets_no_cookie(
    browser: Browser, near_trials: None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    shutil.copytree(stages_of_run(tmp_path_factory)[1], tmp_path / "repo")
    (tmp_path / "tokens").write_text(f"op admin {hashlib.sha256(b'op').hexdigest()}\n")
    given = {"console": True, "console_address": "127.0.0.1:0", "tokens_file": tmp_path / "tokens"}
    picture = tmp_path / "q.png"
    picture.write_bytes(png(images(1)[0]))
    with (
        PictureHost({"i": picture.read_bytes()}) as other,
        running(tmp_path / "repo", tmp_path / "data", **given) as gateway,
        Client(gateway.address, token="op") as operator,
        look.tab(browser) as page,
    ):
        operator.create_when_idle()
        note = {"image_url": other.address.format(id="i")}
        operator.put("g", {"i": picture.read_bytes()}, {"i": note})
        page.goto(gateway.console_address)
        page.get_by_label("Your token of this gateway").fill("op")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="Playground").click()
        page.set_input_files("#picture", picture)
        expect(page.locator("li img").first).to_be_visible()
        # Waiting within the page would take what its security policy forbids.
        shown = "[...document.images].every(one => one.naturalWidth > 0)"
        wait_until(lambda: page.evaluate(shown), "the picture is not shown")
        assert [one["name"] for one in page.context.cookies(page.url)] == ["nobackfill-console"]
        assert other.headers
        assert not any("Cookie" in one or "Referer" in one for one in other.headers)
