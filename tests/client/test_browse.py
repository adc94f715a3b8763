"""The pages of `edge-client browse` over HTTP: what they show, and what attackers get."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from nobackfill.client.device import Device
from nobackfill.client.gallery_file import sidecar_path
from nobackfill.client.maintenance import collect_garbage, delete
from nobackfill.gallery.store import NewVectors
from nobackfill.images import LARGEST_IMAGE_BYTES
from nobackfill.plugins.web.browse.app import make_site
from tests.support import edge, graphs
from tests.support.edge import Setting

HOST, TOKEN = "127.0.0.1:8642", "a-token-that-nobody-guesses"
AT = f"http://{HOST}/{TOKEN}"
OURS = {"Origin": f"http://{HOST}"}
PASSWORDS = "root:x:0:0"


@pytest.fixture
def device(setting: Setting) -> Iterator[Device]:
    with Device(setting.gallery) as opened:
        yield opened


@pytest.fixture
def client(device: Device) -> TestClient:
    return opened_at(device)


@pytest.fixture(scope="module")
def attacked(
    world: edge.World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[TestClient, Device]]:
    """One for all attacks: none of them changes anything."""
    setting = world.setting(tmp_path_factory.mktemp("attacked"))
    with Device(setting.gallery) as device:
        before = device.store.state(), [item.id for item in device.store.list_items()]
        yield opened_at(device), device
        assert before == (device.store.state(), [item.id for item in device.store.list_items()])


@pytest.fixture(scope="module")
def target(attacked: tuple[TestClient, Device]) -> TestClient:
    return attacked[0]


def opened_at(device: Device) -> TestClient:
    app = make_site(device, [HOST], TOKEN)
    return TestClient(app, base_url=AT, raise_server_exceptions=False)


def first_label(device: Device) -> int:
    return device.store.list_items()[0].label


def test_only_who_knows_the_address_is_answered(target: TestClient) -> None:
    assert target.get(f"{AT}/").status_code == 200
    at = f"http://{HOST}"
    wrong = ("/", "", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", f"//{TOKEN}/", f"/{TOKEN.upper()}/")
    for path in (*wrong, "/static/pages.js", "/item/1", f"/x/../{TOKEN[:5]}/"):
        answer = target.get(at + path)
        assert (answer.status_code, len(answer.content)) == (404, 96), path
        assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{HOST[-4:]}", "127.0.0.1", "127.0.0.1:1", "localhost", ""],
)
def test_a_name_that_is_not_ours_leads_nowhere(target: TestClient, host: str) -> None:
    """DNS rebinding: a name of the attacker's that resolves to 127.0.0.1."""
    assert target.get(f"{AT}/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": f"https://{HOST}"},
        {"Origin": "http://127.0.0.1:8643"},
        {**OURS, "Sec-Fetch-Site": "cross-site"},
        {**OURS, "Sec-Fetch-Site": "same-site"},
    ],
)
@pytest.mark.parametrize("path", ["/sync", "/rollback", "/again", "/search"])
def test_no_other_page_changes_anything(
    target: TestClient, headers: dict[str, str], path: str
) -> None:
    assert target.post(AT + path, headers=headers).status_code == 403


def test_no_other_page_loads_anything_and_links_may_lead_here(target: TestClient) -> None:
    elsewhere = {"Sec-Fetch-Site": "cross-site"}
    assert target.get(f"{AT}/thumb/1", headers=elsewhere).status_code == 403
    followed = {**elsewhere, "Sec-Fetch-Mode": "navigate"}
    assert target.get(f"{AT}/", headers=followed).status_code == 200
    for method in ("OPTIONS", "PUT", "DELETE", "TRACE", "PATCH"):
        answer = target.request(method, f"{AT}/sync", headers=OURS)
        assert answer.status_code == 405
        assert "access-control-allow-origin" not in answer.headers


def test_no_file_is_served_that_no_item_was_made_of(
    client: TestClient, device: Device, setting: Setting, tmp_path: Path
) -> None:
    """Paths in the metadata, and links at the place of an image, lead to nothing else."""
    space, dim = device.store.active().spec.space, graphs.DIM
    one = np.eye(1, dim, dtype=np.float32)
    secret = tmp_path / "secret.png"
    shutil.copy(setting.images[1], secret)
    device.store.put(["liar"], [NewVectors(space, one)], metadata=[{"path": "/etc/passwd"}])
    device.store.put(
        ["thief"], [NewVectors(space, one)], digests=["0" * 64], metadata=[{"path": str(secret)}]
    )
    mine = tmp_path / "mine.png"
    shutil.copy(setting.images[0], mine)
    device.put({"swapped": mine})
    mine.unlink()
    mine.symlink_to(secret)
    for name in ("liar", "thief", "swapped"):
        item = device.store.get(name)
        assert item is not None
        for what in ("thumb", "picture"):
            answer = client.get(f"{AT}/{what}/{item.label}")
            assert answer.headers["content-type"] == "image/svg+xml"
            assert "missing" in answer.text and PASSWORDS not in answer.text
        assert "The original is missing" in client.get(f"{AT}/item/{item.label}").text
    assert not list(sidecar_path(device.path, "thumbs").glob("*"))


@pytest.mark.parametrize(
    "path",
    [
        "static/../guard.py", "static/%2e%2e%2fguard.py", "static/..%2f..%2f..%2fetc/passwd",
        "static/guard.py", "static//etc/passwd", "thumb/../../etc/passwd", "thumb/-1", "thumb/0",
        "thumb/99999999999999999999999", "picture/1.5", "item/abc", "item/%00",
    ],
)  # fmt: skip
def test_no_path_leads_out(target: TestClient, path: str) -> None:
    answer = target.get(f"{AT}/{path}")
    assert answer.status_code == 404
    assert PASSWORDS not in answer.text and "class Guard" not in answer.text


def test_what_an_item_says_stays_text(client: TestClient, device: Device) -> None:
    space = device.store.active().spec.space
    one = np.eye(1, graphs.DIM, dtype=np.float32)
    bad = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"
    device.store.put([bad], [NewVectors(space, one)], metadata=[{bad: bad, "name": bad, "n": True}])
    item = device.store.get(bad)
    assert item is not None
    for path in ("", f"item/{item.label}", "?where=" + bad, "?where=n=true", "?after=" + bad):
        text = client.get(f"{AT}/{path}").text
        assert "<script>alert" not in text and "<img src=x" not in text, path
    assert client.get(f"{AT}/", params={"where": f"name={bad}"}).text.count('class="tile "') == 1


def test_a_picture_is_searched_and_what_is_none_is_refused(
    client: TestClient, setting: Setting, device: Device
) -> None:
    picture = setting.images[2].read_bytes()
    found = client.post(f"{AT}/search", content=picture, headers=OURS)
    assert re.findall(r"<span>(0-\d+\.png)</span>", found.text)[0] == setting.images[2].name
    narrowed = client.post(f"{AT}/search?where=name=0-0007.png", content=picture, headers=OURS)
    assert re.findall(r"<span>(0-\d+\.png)</span>", narrowed.text) == ["0-0007.png"]
    answers = {b"no picture": 422, b"": 422, b"\xff" * (LARGEST_IMAGE_BYTES + 1): 413}
    for content, status in answers.items():
        refused = client.post(f"{AT}/search", content=content, headers=OURS)
        assert (refused.status_code, refused.text.count('role="alert"')) == (status, 1)
    assert device.store.count() == len(setting.images)
    assert client.post(f"{AT}/sync", content=b"x" * 70_000, headers=OURS).status_code == 413


@pytest.mark.parametrize(
    "asked", ["where=", "where=a", "where=a>x", "after=x", "after=-1", "where=n>true"]
)
def test_what_cannot_be_asked_gets_a_sentence(target: TestClient, asked: str) -> None:
    answer = target.get(f"{AT}/?{asked}")
    assert answer.status_code == 422
    assert 'role="alert"' in answer.text


@pytest.mark.parametrize(
    "asked", ["count=0", "count=-1", "count=x", "count=1e9", "label=0x1", "", "%ff=1"]
)
def test_what_cannot_be_done_gets_a_sentence(target: TestClient, asked: str) -> None:
    assert target.post(f"{AT}/again", content=asked, headers=OURS).status_code == 422


def test_small_copies_are_private_and_go_with_their_item(
    client: TestClient, device: Device
) -> None:
    label = first_label(device)
    folder = sidecar_path(device.path, "thumbs")
    assert client.get(f"{AT}/thumb/{label}").content[:2] == b"\xff\xd8"
    (copy,) = folder.iterdir()
    assert (folder.stat().st_mode & 0o777, copy.stat().st_mode & 0o777) == (0o700, 0o600)
    copy.write_bytes(b"\xff\xd8 half of one")
    assert client.get(f"{AT}/thumb/{label}").content[-2:] == b"\xff\xd9"
    (item,) = device.store.items([label])
    assert item is not None
    delete(device, [item.id])
    assert not list(folder.iterdir())
    assert client.get(f"{AT}/item/{label}").status_code == 404
    (folder / f"{label}.jpg").write_bytes(b"left over")
    collect_garbage(device)
    assert not list(folder.iterdir())


def test_the_pages_follow_what_other_commands_do(
    client: TestClient, device: Device, setting: Setting, world: edge.World, near_gate: None
) -> None:
    def names(path: str) -> list[str]:
        return re.findall(r"<span>(0-\d+\.png)</span>", client.get(f"{AT}/{path}").text)

    label = first_label(device)
    assert len(names(f"item/{label}")) == len(setting.images) - 1
    with Device(setting.gallery) as other:
        delete(other, [other.store.list_items()[-1].id])
    assert len(names(f"item/{label}")) == len(setting.images) - 2
    before = names(f"item/{label}")
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    text = client.get(f"{AT}/item/{label}").text
    assert "by the route 1 → 2" in text and "What changed for this picture" in text
    # The upgrade of the test releases is exact: nothing moves.
    assert names(f"item/{label}") == before + before[:10] + before[:10]
    assert "→ 1<" not in text
