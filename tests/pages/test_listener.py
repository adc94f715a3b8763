"""Who holds a connection and asks nothing, leaves in the middle, or calls by another name."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest
import trustme
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nobackfill.errors import UnauthenticatedError
from nobackfill.plugins.web.guard import Guard
from nobackfill.plugins.web.listener import Listener
from nobackfill.plugins.web.site import Site
from tests.support.waiting import wait_until

HEAD = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: %d\r\n"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Listener]:
    """A site that tells how long what was posted is, to nobody at /closed; impatient."""
    monkeypatch.setattr("nobackfill.plugins.web.listener._HEAD_SECONDS", 0.3)
    monkeypatch.setattr("nobackfill.plugins.web.site._BODY_SECONDS", 0.3)

    def nobody(request: Request) -> None:
        raise UnauthenticatedError("log in")

    def slow(request: Request) -> Response:
        time.sleep(1)
        return PlainTextResponse("late")

    def length(request: Request, body: bytes) -> Response:
        return PlainTextResponse(str(len(body)))

    site = Site(tmp_path, "Site", [])
    site.get("/slow", slow)
    site.post("/open", length)
    site.post("/closed", length, 10**9, check=nobody)
    with Listener("127.0.0.1", 0) as made:
        yield made.serve(site.app())


def connected(listener: Listener) -> socket.socket:
    made = socket.create_connection((listener.host, listener.port))
    made.settimeout(20)
    return made


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: local"])
def test_who_begins_no_request_is_cut_off(listener: Listener, sent: bytes) -> None:
    with connected(listener) as stranger:
        stranger.sendall(sent)
        assert stranger.recv(1) == b""


def test_who_sends_half_a_head_after_a_request_is_cut_off(listener: Listener) -> None:
    with connected(listener) as stranger:
        stranger.sendall(HEAD % (b"open", 1) + b"\r\nx" + HEAD % (b"open", 1))
        said = b""
        while part := stranger.recv(4096):
            said += part
        assert said.startswith(b"HTTP/1.1 200") and said.endswith(b"1")


def test_an_answer_may_take_longer(listener: Listener) -> None:
    assert httpx2.get(f"{listener.address}/slow").text == "late"


def test_a_body_has_to_come_to_an_end(listener: Listener) -> None:
    with connected(listener) as stranger:
        stranger.sendall(HEAD % (b"open", 100) + b"\r\nhalf")
        assert stranger.recv(64).startswith(b"HTTP/1.1 422")


def test_no_body_is_read_of_who_may_not_send_one(listener: Listener) -> None:
    with connected(listener) as stranger:
        stranger.sendall(HEAD % (b"closed", 10**8) + b"\r\n")
        assert stranger.recv(64).startswith(b"HTTP/1.1 401")


def test_who_leaves_in_the_middle_is_no_traceback(
    listener: Listener, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(listener) as stranger:
        stranger.sendall(HEAD % (b"open", 100) + b"\r\nhalf")
    assert httpx2.get(f"{listener.address}/slow").text == "late"
    wait_until(lambda: httpx2.get(f"{listener.address}/none").status_code == 404, "it answers")
    assert capfd.readouterr().err == ""


def test_a_certificate_for_any_name_below_one_is_one_label_more() -> None:
    guard = Guard(PlainTextResponse("in"), ["*.x.example:1", "[::1]:1"], None)
    for host, let_in in {
        "a.x.example:1": True, "A.X.example:1": True, "[::1]:1": True, "x.example:1": False,
        "a.b.x.example:1": False, "a.x.example": False, "evil.example:1": False, "": False,
    }.items():  # fmt: skip
        scope = {
            "type": "http",
            "method": "GET",
            "path": "/",
            "headers": [(b"host", host.encode())],
        }
        assert (guard._refusal(scope) is None) is let_in, host


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Listener]:
    """A site whose every peer but 127.0.0.1 is from elsewhere; who writes `me` is known."""
    monkeypatch.setattr("nobackfill.plugins.web.listener.is_loopback", "127.0.0.1".__eq__)

    def length(request: Request, body: bytes) -> Response:
        return PlainTextResponse(str(len(body)))

    site = Site(tmp_path, "Site", [])
    site.post("/open", length)
    site.get("/", lambda request: PlainTextResponse("in"))
    with Listener("127.0.0.1", 0) as made:
        yield made.serve(site.app(), lambda scope: bool(scope["query_string"] == b"me"))


def comer(listener: Listener, address: str, sent: bytes = b"") -> socket.socket:
    """A connection from an address, with the first bytes of a request."""
    made = socket.create_connection((listener.host, listener.port), source_address=(address, 0))
    made.settimeout(20)
    made.sendall(sent)
    return made


def asked(listener: Listener, address: str, path: str = "/") -> bytes:
    """The answer to a request that is sent at once."""
    with comer(listener, address, b"GET %s HTTP/1.1\r\nHost: x\r\n\r\n" % path.encode()) as one:
        return one.recv(64).split(b"\r\n")[0].removeprefix(b"HTTP/1.1 ")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2"], ids=["here", "elsewhere"])
@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x"], ids=["silent", "half"])
def test_who_says_nothing_keeps_nobody_out(crowded: Listener, address: str, sent: bytes) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(comer(crowded, address, sent)) for _ in range(130)]
        for one in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
            assert asked(crowded, one) == b"200 OK"
        # The ones that were silent for longest have gone.
        assert silent[0].recv(1) == b""


@pytest.mark.long
def test_who_begins_no_tls_is_cut_off_and_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.plugins.web.listener._HEAD_SECONDS", 2.0)
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key.pem")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    context = ssl.create_default_context()
    authority.configure_trust(context)
    site = Site(tmp_path, "Site", [])
    site.get("/", lambda request: PlainTextResponse("in"))
    with (
        Listener("127.0.0.1", 0, (tmp_path / "cert.pem", tmp_path / "key.pem", None)) as made,
        ExitStack() as stack,
    ):
        made.serve(site.app())
        silent = [stack.enter_context(connected(made)) for _ in range(300)]
        assert httpx2.get(made.address, verify=context).text == "in"
        assert silent[-1].recv(1) == b""


def test_requests_that_never_end_take_their_peers_places_alone(crowded: Listener) -> None:
    drip = HEAD % (b"open", 100) + b"\r\nhalf"
    with ExitStack() as stack:
        begun = [stack.enter_context(comer(crowded, "127.0.0.2", drip)) for _ in range(40)]
        wait_until(lambda: asked(crowded, "127.0.0.2")[:3] == b"503", "it has all places")
        for other in ("127.0.0.1", "127.0.0.3"):
            assert asked(crowded, other) == b"200 OK"
        assert asked(crowded, "127.0.0.2", "/?me") == b"200 OK"
        # Many peers have what strangers have together.
        for peer in range(3, 9):
            begun += [
                stack.enter_context(comer(crowded, f"127.0.0.{peer}", drip)) for _ in range(10)
            ]
        wait_until(lambda: asked(crowded, "127.0.0.99")[:3] == b"503", "they have all places")
        assert asked(crowded, "127.0.0.1") == b"200 OK"
        assert asked(crowded, "127.0.0.99", "/?me") == b"200 OK"
    wait_until(lambda: asked(crowded, "127.0.0.2") == b"200 OK", "places are given back")
