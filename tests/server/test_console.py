"""The console over HTTP: with a gateway's tokens, each page shows what its role may, no more."""

import hashlib
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2
import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram

from nobackfill.plugins.web.console.operations import evidence_matrix
from nobackfill.plugins.web.console.playground import _picture_url
from nobackfill.plugins.web.console.sessions import LoadMeter
from nobackfill.release.manifest import Cell, Manifest, RouteEvidence
from nobackfill.server.gateway import GatewayServer
from nobackfill.wire.answers import Hit
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.support.blocks import png
from tests.support.clock import replace_clock
from tests.support.waiting import wait_until

ROLES = ("admin", "reader", "reader:other", "device")


@pytest.fixture(scope="module")
def guarded(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayServer]:
    """A gateway with a token for each of ROLES, its name, and three items; release 2 published."""
    folder = tmp_path_factory.mktemp("console")
    shutil.copytree(stages[1], folder / "repo")
    tokens = folder / "tokens"
    lines = [f"{n} {role} {digest(role)}\n" for n, role in enumerate(ROLES)]
    tokens.write_text("".join(lines))
    with running(
        folder / "repo", folder / "data", console=True, console_address="127.0.0.1:0",
        tokens_file=tokens,
    ) as gateway:  # fmt: skip
        with Client(gateway.address, token="admin") as client:
            client.create_when_idle()
            client.put_images(images(3))
        yield gateway


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@contextmanager
def browser(gateway: GatewayServer, token: str | None = None) -> Iterator[httpx2.Client]:
    """Follows no redirects; what it sends comes from the console's own pages, those of a session
    where it has a token."""
    at = gateway.console_address
    with httpx2.Client(base_url=at, headers={"Origin": at.rstrip("/")}, timeout=30) as client:
        if token is not None:
            answer = client.post("/login", data={"token": token})
            assert answer.status_code == 303
            client.base_url = client.base_url.join(answer.headers["location"])
        yield client


def test_nobody_sees_anything_before_a_token(guarded: GatewayServer) -> None:
    with browser(guarded) as nobody:
        for path in ("/", "/release/1", "/gallery/g", "/rollback", "/playground", "/live"):
            answer = nobody.get(path)
            assert (answer.status_code, answer.headers.get("location")) == (303, "/login"), path
        for path in ("/release/1/activate", "/rollback", "/playground/search?gallery=g"):
            assert nobody.post(path, content=b"rollout=dual&to=1").status_code == 401, path
        for token in ("", "wrong", "a\nb", "ü", "x" * 5000):
            answer = nobody.post("/login", data={"token": token})
            assert answer.status_code == 401, token
            assert "set-cookie" not in answer.headers
        nobody.cookies.set("nobackfill-console", "guessed")
        assert nobody.get("/").status_code == 303
        assert nobody.get(f"/{'x' * 43}/").status_code == 303
        # In a browser a link to /\HOST leads to HOST.
        for odd in ("%5C" + "x" * 42, "x" * 42 + "%C3%A9", "x" * 42):
            assert nobody.get(f"/{odd}/login").status_code == 404, odd


def test_a_session_is_a_cookie_that_no_script_and_no_other_site_has(guarded: GatewayServer) -> None:
    with browser(guarded) as client:
        entered = client.post("/login", data={"token": "reader"})
        cookie, path = entered.headers["set-cookie"].lower(), entered.headers["location"]
        assert "httponly" in cookie and "samesite=strict" in cookie and "reader" not in cookie
        # Cookies go to all ports of a host; this one to addresses that nobody else knows.
        assert len(path) > 40 and f"path={path.lower()}" in cookie
        assert client.get(path).status_code == 200
        # Nor does the cookie open another session's pages, nor its own path without it.
        with browser(guarded, "admin") as other:
            value = client.cookies["nobackfill-console"]
            given = {"Cookie": f"nobackfill-console={value}"}
            assert httpx2.get(other.base_url, headers=given).status_code == 303
        assert httpx2.get(client.base_url.join(path)).status_code == 303
        assert client.get("/").status_code == 303
        client.post(f"{path}logout")
        assert client.get(path).status_code == 303
        elsewhere = {"Origin": "http://evil.example"}
        assert client.post("/login", data={"token": "admin"}, headers=elsewhere).status_code == 403
        assert client.get("/", headers={"Host": "evil.example"}).status_code == 403


def test_a_token_has_so_many_sessions_and_live_pages(guarded: GatewayServer) -> None:
    """Who logs in again and again puts nobody else out, nor does who leaves pages open."""
    with browser(guarded, "admin") as admin, browser(guarded, "device") as first:
        for _ in range(25):
            with browser(guarded, "device") as device:
                assert device.get("/").status_code == 200
        assert admin.get("/").status_code == 200
        assert first.get("/").status_code == 303
        with ExitStack() as open_pages:
            device = open_pages.enter_context(browser(guarded, "device"))
            pages = [
                open_pages.enter_context(device.stream("GET", "/live")).iter_text()
                for _ in range(12)
            ]
            assert [bool(next(page, "")) for page in pages] == [True] * 10 + [False] * 2
            with admin.stream("GET", "/live") as page:
                assert next(page.iter_text(), "")


def test_strangers_take_no_place_of_a_session(guarded: GatewayServer) -> None:
    """Of this machine, too, where everybody is one peer."""
    host, _, port = guarded.console_address.rstrip("/").rpartition("/")[2].rpartition(":")
    head = (
        f"POST /login HTTP/1.1\r\nHost: {host}:{port}\r\nOrigin: http://{host}:{port}\r\n"
        "Content-Length: 100\r\n\r\nhalf"
    )
    with browser(guarded, "admin") as operator, browser(guarded) as nobody, ExitStack() as stack:
        for _ in range(130):
            stranger = socket.create_connection((host, int(port)))
            stack.enter_context(stranger)
            stranger.sendall(head.encode())
        wait_until(lambda: nobody.get("/login").status_code == 503, "they have all places")
        assert operator.get("").status_code == 200
    wait_until(lambda: httpx2.get(guarded.console_address + "login").status_code == 200, "no place")


def test_what_an_activation_says_is_for_those_who_may(guarded: GatewayServer) -> None:
    with browser(guarded, "admin") as admin, browser(guarded, "device") as device:
        begun = admin.post("/release/1/activate", data={"rollout": "cutover"})
        assert begun.status_code == 303
        assert "Release 1, rollout cutover" in text_of(admin.get("/"))
        assert "rollout cutover" not in text_of(device.get("/"))
        # What was refused to one is no activation that another would wait for.
        refused = device.post("/release/1/activate", data={"rollout": "dual"})
        assert refused.status_code == 403
        assert "Release 1, rollout cutover" in text_of(admin.get("/"))


def text_of(page: httpx2.Response) -> str:
    return re.sub("<.*?>", "", page.text)


def test_each_role_sees_and_does_what_its_calls_may(guarded: GatewayServer) -> None:
    picture = png(images(3)[1])
    expected = {"admin": (200, 200), "reader": (200, 200), "reader:other": (403, 403),
                "device": (403, 403)}  # fmt: skip
    for role, (gallery, searched) in expected.items():
        with browser(guarded, role) as client:
            text = client.get("/").text
            assert "release 1" in text
            assert (">g</a>" in text) is (role in ("admin", "reader"))
            assert client.get("/gallery/g").status_code == gallery
            answer = client.post("/playground/search?gallery=g", content=picture)
            assert answer.status_code == searched, role
            if searched == 200:
                assert re.findall(r"<code>(i\d)</code>", answer.text)[0] == "i1"
            if role != "admin":
                assert client.get("/rollback").status_code == 403
                assert client.post("/rollback", data={"to": "1"}).status_code == 403
                changed = client.post("/release/1/activate", data={"rollout": "dual"})
                assert changed.status_code == 403, role
    assert guarded.state.current.active == 1


def test_what_cannot_be_asked_gets_a_sentence(guarded: GatewayServer) -> None:
    with browser(guarded, "admin") as client:
        wrong = {"/release/99": 404, "/gallery/none": 404, "/gallery/%2e%2e": 404, "/nothing": 404,
                 "/release/4294967296": 404, f"/release/{'9' * 5000}/estimate": 404,
                 "/release/one": 404}  # fmt: skip
        for path, status in wrong.items():
            answer = client.get(path)
            assert (answer.status_code, answer.text.count('role="alert"')) == (status, 1), path
        for body in ({"rollout": "sideways"}, {}):
            assert client.post("/release/1/activate", data=body).status_code == 422
        beyond = client.post("/release/4294967296/activate", data={"rollout": "dual"})
        assert beyond.status_code == 404
        assert client.post("/rollback", data={"to": "-1"}).status_code == 422
        assert client.post("/playground/search?gallery=g", content=b"none").status_code == 422
        assert client.post("/playground/search", content=b"none").status_code == 422


def test_a_token_that_is_revoked_ends_its_session(guarded: GatewayServer) -> None:
    """Asked again at each page: the console remembers no rights."""
    with browser(guarded, "reader") as client:
        assert client.get("/").status_code == 200
        file = guarded._settings.tokens_file
        assert file is not None
        kept = [line for line in file.read_text().splitlines() if digest("reader") not in line]
        file.write_text("\n".join(kept) + "\n")
        for _ in range(100):
            if client.get("/").status_code == 303:
                break
            time.sleep(0.1)
        assert client.get("/gallery/g").status_code == 303


def test_hits_lead_to_addresses_of_the_web_alone() -> None:
    def url(template: str, **metadata: str) -> str:
        return _picture_url(Hit("a/b", 0.0, None, 1, "native", metadata), template)

    assert url("https://x/{id}.jpg") == "https://x/a%2Fb.jpg"
    assert url("https://x/{k}", k="?&<") == "https://x/%3F%26%3C"
    assert url("", image_url="http://x/1") == "http://x/1"
    for bad in ("javascript:alert(1)", "data:text/html,x", "file:///etc/passwd", "//x"):
        assert url(bad) == "" == url("", image_url=bad)


def test_the_matrix_is_that_of_the_manifest(two: Manifest) -> None:
    def cell(query: str, gallery: str, quality: float) -> Cell:
        return Cell(query=query, gallery=gallery, cmc1=0.5, cmc5=1, map=quality, queries=9, items=9)

    route = RouteEvidence(releases=(1, 2), map=0.7, cmc1=0.5, kept=0.9)
    cells = (cell("1", "1", 0.4), cell("2", "1", 0.1), cell("2", "1>2", 0.7), cell("2", "2", 0.8),
             cell("3", "3", 1.0))  # fmt: skip
    shown = evidence_matrix(two.model_copy(update={"evidence": cells, "routes": (route,)}), 1)
    assert {place: (round(one.map), round(one.shade, 3)) for place, one in shown.items()} == {
        ("old", "old"): (40, 0.5), ("new", "old"): (10, 0.125),
        ("new", "served"): (70, 0.875), ("new", "new"): (80, 1.0),
    }  # fmt: skip
    assert evidence_matrix(two.model_copy(update={"evidence": ()}), 1) == {}


def test_the_load_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = CollectorRegistry()
    call = ["grpc_service", "grpc_method"]
    seconds = Histogram("grpc_server_handling_seconds", "t", call, buckets=(0.01, 0.1, 1),
                        registry=registry)  # fmt: skip
    ended = Counter("grpc_server_handled_total", "n", [*call, "grpc_code"], registry=registry)
    before = seconds.labels("s", "Search")
    for _ in range(1000):
        before.observe(5)
    meter = LoadMeter(registry)
    assert meter.measure().p50_ms is None
    for _ in range(98):
        before.observe(0.005)
    seconds.labels("s", "PutItems").observe(9)
    before.observe(0.5)
    before.observe(0.5)
    ended.labels("s", "Search", "OK").inc(97)
    ended.labels("s", "Search", "INTERNAL").inc(3)
    ended.labels("s", "Search", "INVALID_ARGUMENT").inc(3)
    load = meter.measure()
    assert load.failed_searches == 3
    assert load.p50_ms == pytest.approx(10 * 50 / 98)
    assert load.p99_ms == pytest.approx(100 + 900 * 0.5)
    # Who comes back after an hour is not told of that hour.
    hour = time.monotonic() + 3600
    replace_clock(monkeypatch, LoadMeter.__module__, monotonic=lambda: hour)
    assert (meter.measure().failed_searches, meter.measure().p50_ms) == (0, None)


def test_a_release_that_may_meet_old_vectors_is_asked_with_them(
    direct_stages: Stages, tmp_path: Path, near_gate: None
) -> None:
    """Old/old, new/old and new/upgraded: each column has the picture's own item first."""
    repo = tmp_path / "repo"
    shutil.copytree(direct_stages[1], repo)
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(repo, tmp_path / "data", **given) as gateway, Client(gateway.address) as client:
        client.create_when_idle()
        client.put_images(images(3))
        publish_stage(repo, direct_stages[2])
        gateway.catalog.refresh()
        client.swap(2, "dual")
        address = gateway.console_address
        answer = httpx2.post(
            f"{address}playground/search?gallery=g", content=png(images(3)[1]), timeout=30,
            headers={"Origin": address[: address.index("/", 8)]},
        )  # fmt: skip
    columns = re.findall(r'<section aria-label="(.*?)">(.*?)</section>', answer.text, re.S)
    first = {
        title: re.findall(r"<code>(.*?)</code> <span.*?>(.*?)<", text)[0] for title, text in columns
    }
    assert first == {
        "release 1 searches its own vectors": ("i1", "release 1, native"),
        "release 2 searches the vectors of release 1": ("i1", "release 1, native"),
        "release 2, as it is served": ("i1", "release 2, upgraded"),
    }


def test_a_gateway_without_tokens_has_a_secret_address(repo: Path, tmp_path: Path) -> None:
    given = {"console": True, "console_address": "127.0.0.1:0"}
    with running(repo, tmp_path / "data", **given) as gateway:
        at = gateway.console_address
        assert httpx2.get(at).status_code == 200
        assert httpx2.get(at[: at.index("/", 8)] + "/").status_code == 404
        assert httpx2.get(at + "login").status_code == 404
        assert at.split("/")[3] not in (tmp_path / "data" / "state.json").read_text()
    with running(repo, tmp_path / "data") as gateway:
        assert gateway.console_address == ""
        assert not (tmp_path / "data" / "console.sock").exists()
