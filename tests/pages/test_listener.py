"""Who holds a connection and asks nothing, leaves in the middle, or calls by another name."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from nobackfill.errors import UnauthenticatedError
from nobackfill.pages import Guard, Listener, Site
from tests.support.waiting import wait_until

HEAD = b"POST /%s HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\nContent-Length: %d\r\n"


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Listener]:
    """A site that tells how long what was posted is, to nobody at /closed; impatient."""
    monkeypatch.setattr("nobackfill.pages.listener._HEAD_SECONDS", 0.3)
    monkeypatch.setattr("nobackfill.pages.site._BODY_SECONDS", 0.3)

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
    site.post("/closed", length, 10**9, before=nobody)
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
