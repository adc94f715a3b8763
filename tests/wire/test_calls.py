"""Deadlines, retries and errors of the gRPC channel, against a real server that misbehaves."""

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from typer.testing import CliRunner

from nobackfill import errors
from nobackfill.client.cli.main import run_line
from nobackfill.client.output import Output
from nobackfill.server.cli import main  # noqa: F401 - it brings the commands
from nobackfill.server.cli.app import app as server_app
from nobackfill.server.cli.app import print_result
from nobackfill.v1 import release_pb2
from nobackfill.wire.answers import Answer, Hit
from nobackfill.wire.connection import open_channel
from nobackfill.wire.gateway import Gateway
from tests.wire.scripted import Scripted, serving


@pytest.fixture
def server() -> Iterator[tuple[Scripted, str]]:
    with serving() as served:
        yield served


def ask(address: str, seconds: float = 30.0) -> Answer[Hit]:
    with Gateway(address, seconds=seconds) as gateway:
        return gateway.search("gallery", embeddings={"sp-x": [1.0, 0.0]})


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED])
def test_transient_failures_are_tried_again(
    server: tuple[Scripted, str], code: grpc.StatusCode
) -> None:
    scripted, address = server

    def behave(call: int, context: grpc.ServicerContext) -> None:
        if call <= 3:
            context.abort(code, "later")

    scripted.behave = behave
    assert ask(address).release == 7
    assert scripted.calls == 4


def test_lasting_refusals_are_not_tried_again(server: tuple[Scripted, str]) -> None:
    scripted, address = server

    def behave(call: int, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "expected 64 values, got 2")

    scripted.behave = behave
    with pytest.raises(errors.InvalidInputError, match="expected 64 values"):
        ask(address)
    assert scripted.calls == 1


def test_a_stalled_attempt_is_dropped_and_the_deadline_held(
    server: tuple[Scripted, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted, address = server

    def behave(call: int, context: grpc.ServicerContext) -> None:
        while context.is_active():
            time.sleep(0.01)

    scripted.behave = behave
    started = time.monotonic()
    with pytest.raises(errors.UnavailableError):
        ask(address, seconds=0.5)
    assert time.monotonic() - started < 5


def test_nobody_there() -> None:
    with pytest.raises(errors.UnavailableError, match=r"127\.0\.0\.1:1:"):
        ask("127.0.0.1:1", seconds=0.3)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "grpc://127.0.0.1:1"])
def test_a_token_never_travels_in_the_clear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("NOBACKFILL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(errors.ConfigurationError, match="grpcs://"):
        open_channel(address)


def test_every_command_refuses_a_token_without_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("NOBACKFILL_TOKEN_FILE", str(tmp_path / "token"))
    commands: list[list[str]] = [
        ["releases"], ["status"], ["activate", "1"], ["rollback"], ["retire"],
        ["estimate", "g", "1"], ["watch"],
    ]  # fmt: skip
    for command in commands:
        said = CliRunner().invoke(server_app, [*command, "--server=127.0.0.1:1"])
        assert said.exit_code == 78, command
        assert "is sent over TLS only" in said.output
    gallery = tmp_path / "g.sqlite"
    with pytest.raises(SystemExit) as ended:
        run_line([f"--gallery={gallery}", "init", "--from=grpc://127.0.0.1:1"])
    assert ended.value.code == 78
    assert "is sent over TLS only" in capsys.readouterr().err


@pytest.mark.parametrize("token", [b"", b"two words", b"\xff", b"a\nb"])
def test_a_file_that_holds_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: bytes
) -> None:
    (tmp_path / "token").write_bytes(token)
    monkeypatch.setenv("NOBACKFILL_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(errors.ConfigurationError, match="one token"):
        open_channel("grpcs://127.0.0.1:1")


def test_a_client_certificate_needs_its_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC would end the process without the one, and fail each handshake with a wrong one."""
    for name in ("own", "other"):
        issued = trustme.CA().issue_cert("app@example.org")
        issued.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        issued.cert_chain_pems[0].write_to_path(tmp_path / f"{name}.pem")
    files = {"NOBACKFILL_CERT_FILE": "own.pem", "NOBACKFILL_KEY_FILE": "own.key"}
    for missing, present in (files, reversed(files)):
        monkeypatch.setenv(present, str(tmp_path / files[present]))
        monkeypatch.delenv(missing, raising=False)
        with pytest.raises(errors.ConfigurationError, match=f"{present} is set without {missing}"):
            open_channel("grpcs://127.0.0.1:1")
    for key in ("other.key", "own.pem"):
        monkeypatch.setenv("NOBACKFILL_CERT_FILE", str(tmp_path / "own.pem"))
        monkeypatch.setenv("NOBACKFILL_KEY_FILE", str(tmp_path / key))
        with pytest.raises(errors.ConfigurationError, match="files that belong together"):
            open_channel("grpcs://127.0.0.1:1")
    monkeypatch.setenv("NOBACKFILL_KEY_FILE", str(tmp_path / "own.key"))
    open_channel("grpcs://127.0.0.1:1").close()


def test_an_unknown_scheme() -> None:
    with pytest.raises(errors.ConfigurationError, match="https://"):
        open_channel("https://127.0.0.1:1")


def test_what_a_server_says_cannot_move_the_cursor() -> None:
    """One line of text, and the exit code of the one table."""
    evil = "\x1b]0;owned\x07\nall is well"

    def refuse(_request: release_pb2.ListReleasesRequest, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.OUT_OF_RANGE, evil)

    handler: Any = grpc.unary_unary_rpc_method_handler(
        refuse, release_pb2.ListReleasesRequest.FromString
    )
    service = "nobackfill.v1.ReleaseService"
    running = grpc.server(futures.ThreadPoolExecutor(2))
    methods = {"ListReleases": handler}
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = running.add_insecure_port("127.0.0.1:0")
    running.start()
    try:
        said = CliRunner().invoke(server_app, ["releases", f"--server=127.0.0.1:{port}"])
    finally:
        running.stop(None).wait()
    assert said.exit_code == 65
    assert said.output.count("\n") == 1
    assert "\x1b" not in said.output
    assert r"\x1b]0;owned\x07\nall is well" in said.output


def test_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Output().print_result({}, "a\x1b[2Jb", "c\nd")
    Output().print_note("e\rf")
    print_result(False, {}, [["gallery"], ["\x1b[31m[bold]g\n"]])
    said = capsys.readouterr()
    assert said.out.splitlines()[:2] == [r"a\x1b[2Jb", r"c\nd"]
    assert said.err == "e\\rf\n"
    assert r"\x1b[31m[bold]g\n" in said.out


_OPEN_AND_CLOSE = """
import sys, time
from nobackfill.wire.connection import open_channel
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    channel = open_channel("grpcs://" + sys.argv[1])
    channel.unary_unary("/some/method")(b"x", timeout=20)
    channel.close()
"""


@pytest.mark.faults
def test_closing_a_channel_with_a_token_never_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC's own deadlock, which ended a trial of 75 s before (grpc/grpc pull 42247)."""
    authority = trustme.CA()
    own = authority.issue_cert("127.0.0.1")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("NOBACKFILL_CA_FILE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("NOBACKFILL_TOKEN_FILE", str(tmp_path / "token"))
    key, certificate = own.private_key_pem.bytes(), own.cert_chain_pems[0].bytes()

    class Echo(grpc.GenericRpcHandler):
        def service(self, _: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
            return grpc.unary_unary_rpc_method_handler(lambda request, _: request)

    server = grpc.server(futures.ThreadPoolExecutor(4), handlers=[Echo()])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    try:
        command = [sys.executable, "-c", _OPEN_AND_CLOSE, f"127.0.0.1:{port}", "90"]
        subprocess.run(command, check=True, timeout=150)
    finally:
        server.stop(None)
