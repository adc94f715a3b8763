"""Who may call what: a rule for every call there is, tokens, TLS, two roles end to end."""

import hashlib
import shutil
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

from nobackfill.errors import (
    ConfigurationError,
    NotPermittedError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)
from nobackfill.server.grpc.context import RULES, Role, Tokens, authorize
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2, upgrade_pb2, vault_pb2
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
from nobackfill.wire.gateway import Gateway
from tests.server.conftest import Stages
from tests.server.support import refused, running
from tests.support.clock import replace_clock
from tests.support.waiting import wait_until

FILES = (search_pb2, gallery_pb2, release_pb2, upgrade_pb2, vault_pb2, health_pb2, reflection_pb2)
METHODS = sorted(
    f"/{service.full_name}/{method.name}"
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)
PUBLIC = {"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"}
TOKENS = {role: f"token-of-{role}" for role in Role}


def tokens_file(path: Path) -> Path:
    lines = ["# who may call what"]
    for role, token in TOKENS.items():
        lines.append(f"{role}-1 {role} {hashlib.sha256(token.encode()).hexdigest()}")
    path.write_text("\n".join(lines))
    return path


def test_every_call_has_a_rule() -> None:
    assert len(METHODS) > 25
    missing = [method for method in METHODS if method not in RULES]
    assert not missing, "a new call needs a rule in grpc/auth.py"


def test_every_rule_is_of_a_call() -> None:
    assert set(RULES) <= {*METHODS, "/grpc.health.v1.Health/List"}


def test_only_health_needs_no_token() -> None:
    assert {method for method, roles in RULES.items() if roles is None} <= {
        *PUBLIC, "/grpc.health.v1.Health/List"
    }  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_a_call_is_for_its_roles_only(method: str, tmp_path: Path) -> None:
    tokens = Tokens(tokens_file(tmp_path / "tokens"))
    allowed = RULES[method]
    for role, token in TOKENS.items():
        if allowed is None or role in allowed:
            authorize(method, tokens, f"Bearer {token}")
        else:
            with pytest.raises(NotPermittedError):
                authorize(method, tokens, f"Bearer {token}")
    for bad in (None, "", "Bearer", "Bearer wrong", f"Basic {TOKENS[Role.ADMIN]}"):
        if allowed is None:
            authorize(method, tokens, bad)
        else:
            with pytest.raises(UnauthenticatedError):
                authorize(method, tokens, bad)


def test_a_call_without_a_rule_is_refused(tmp_path: Path) -> None:
    tokens = Tokens(tokens_file(tmp_path / "tokens"))
    with pytest.raises(NotPermittedError):
        authorize("/nobackfill.v1.SearchService/New", tokens, f"Bearer {TOKENS[Role.ADMIN]}")


def test_a_token_expires(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    path = tmp_path / "tokens"
    past = (datetime.now(UTC) - timedelta(seconds=1)).isoformat()
    path.write_text(f"old reader {digest} {past}\n")
    with pytest.raises(UnauthenticatedError):
        Tokens(path).identify_caller("Bearer secret")
    future = (datetime.now(UTC) + timedelta(hours=1)).isoformat()
    path.write_text(f"new reader {digest} {future}\n")
    assert Tokens(path).identify_caller("Bearer secret").name == "new"


def test_more_calls_than_a_name_may_make_are_refused_for_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    replace_clock(monkeypatch, "nobackfill.server.grpc.context", monotonic=lambda: now)
    path = tmp_path / "tokens"
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "c")}
    ends = "2099-01-01T00:00:00+00:00"
    path.write_text(
        f"app reader {digests['a']} {ends} rate=2\napp reader {digests['b']} rate=2\n"
        f"other reader {digests['c']}\n"
    )
    tokens, search = Tokens(path), "/nobackfill.v1.SearchService/Search"
    for token in ("a", "b"):
        authorize(search, tokens, f"Bearer {token}")
    for _ in range(3):
        # Another token of the same name has no calls of its own.
        with pytest.raises(OverloadedError, match="at most 2 calls a second under the name app"):
            authorize(search, tokens, "Bearer a")
        authorize(search, tokens, "Bearer c")
    now += 0.5
    authorize(search, tokens, "Bearer b")
    with pytest.raises(OverloadedError):
        authorize(search, tokens, "Bearer b")
    for wrong in ("0", "-1", "many", "nan", ""):
        path.write_text(f"app reader {digests['a']} rate={wrong}")
        with pytest.raises(ConfigurationError, match="a number of calls a second"):
            Tokens(path)


def test_a_token_can_be_taken_back(tmp_path: Path) -> None:
    path = tokens_file(tmp_path / "tokens")
    tokens = Tokens(path)
    bearer = f"Bearer {TOKENS[Role.READER]}"
    tokens.identify_caller(bearer)
    path.write_text("# nobody\n")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            tokens.identify_caller(bearer)
        except UnauthenticatedError:
            return
        time.sleep(0.1)
    pytest.fail("the token still works")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("name", "got 1 word;"),
        ("name reader", "got 2 words;"),
        ("name king " + "0" * 64, "roles reader, writer, device, admin, got 'king'"),
        ("name reader 1234", "64 hexadecimal digits, as the third word, got 4 other characters"),
        ("n reader zz", "64 hexadecimal digits"),
        ("n reader " + "0" * 64 + " tomorrow", "time zone, as 2027-.*, got 'tomorrow'"),
        ("n reader " + "0" * 64 + " 2030-01-01T00:00:00", "time zone, as 2027-.*, got '2030-"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, why: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# first\n{line}\n")
    with pytest.raises(ConfigurationError, match=f"line 2: .*{why}"):
        Tokens(path)


def test_the_log_tells_what_the_tokens_file_has(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# nobody yet\n")
    with capture_logs() as logs:
        tokens = Tokens(path)
        assert [one["log_level"] for one in logs] == ["warning"]
        assert "every call is refused" in logs.pop()["event"]
        tokens_file(path)
        wait_until(lambda: tokens.first_expiry() is None and logs != [], what="it is read again")
    assert logs == [{"event": "tokens read again", "count": len(Role), "log_level": "info"}]


class Secured:
    """A gateway behind mTLS with tokens."""

    def __init__(self, address: str, metrics: str, authority: trustme.CA) -> None:
        self.address, self.metrics = address, metrics
        self.authority = authority
        self.own = authority.issue_cert("app@example.org")

    def channel(self, token: str | None, *, certificate: bool = True) -> grpc.Channel:
        pem = self.own
        credentials = grpc.ssl_channel_credentials(
            self.authority.cert_pem.bytes(),
            pem.private_key_pem.bytes() if certificate else None,
            pem.cert_chain_pems[0].bytes() if certificate else None,
        )
        if token is not None:
            credentials = grpc.composite_channel_credentials(
                credentials, grpc.access_token_call_credentials(token)
            )
        return grpc.secure_channel(self.address, credentials)


@pytest.fixture(scope="module")
def secured(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    shutil.copytree(stages[1], folder / "repo")
    authority = trustme.CA()
    server = authority.issue_cert("127.0.0.1", "localhost")
    server.private_key_pem.write_to_path(str(folder / "key.pem"))
    server.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    with running(
        folder / "repo",
        folder / "data",
        tls_cert=folder / "cert.pem",
        tls_key=folder / "key.pem",
        tls_client_ca=folder / "ca.pem",
        tokens_file=tokens_file(folder / "tokens"),
    ) as gateway:
        yield Secured(gateway.address, gateway.metrics_address, authority)


def call(channel: grpc.Channel, method: str) -> grpc.StatusCode:
    """Send a call with an empty request; its status, OK if it was let in and answered."""
    unary = channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
    answers = unary(iter([b""]), timeout=10)
    try:
        next(iter(answers), None)
        answers.cancel()
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


REFUSED = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


def test_every_call_over_the_wire(secured: Secured) -> None:
    """Refused by role before the request is read, so an answer never tells what exists."""
    channels = {role: secured.channel(token) for role, token in TOKENS.items()}
    channels_without = (secured.channel(None), secured.channel("wrong"))
    for method in METHODS:
        allowed = RULES[method]
        for nobody in channels_without:
            code = call(nobody, method)
            expected = allowed is not None
            assert (code is grpc.StatusCode.UNAUTHENTICATED) == expected, (method, code)
        for role, channel in channels.items():
            if allowed is not None and role not in allowed:
                assert call(channel, method) is grpc.StatusCode.PERMISSION_DENIED, (method, role)
            elif not method.endswith(("ActivateRelease", "RetireRelease", "Watch")):
                assert call(channel, method) not in REFUSED, (method, role)
    for channel in (*channels.values(), *channels_without):
        channel.close()


def test_mtls_demands_a_certificate(
    secured: Secured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with secured.channel(TOKENS[Role.ADMIN], certificate=False) as channel:
        assert call(channel, METHODS[0]) is grpc.StatusCode.UNAVAILABLE
    secured.authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("NOBACKFILL_CA_FILE", str(tmp_path / "ca.pem"))
    with (
        Gateway(secured.address, tls=True, seconds=1) as app,
        pytest.raises(UnavailableError, match="set NOBACKFILL_CERT_FILE and NOBACKFILL_KEY_FILE"),
    ):
        list(app.list_galleries())


def test_plain_text_is_refused(secured: Secured) -> None:
    with grpc.insecure_channel(secured.address) as channel:
        assert call(channel, METHODS[0]) is grpc.StatusCode.UNAVAILABLE


def test_health_is_told_to_anyone(secured: Secured) -> None:
    with secured.channel(None) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=10)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_a_kubelet_asks_without_a_certificate_or_a_token(secured: Secured) -> None:
    for page in ("healthz", "readyz"):
        with urllib.request.urlopen(f"http://{secured.metrics}/{page}", timeout=10) as answer:
            assert answer.status == 200, page


def test_the_same_refusal_with_and_without_the_object(secured: Secured) -> None:
    with secured.channel(TOKENS[Role.DEVICE]) as channel:
        stub = GalleryServiceStub(channel)

        def ask(name: str) -> str:
            with refused(NotPermittedError) as caught:
                stub.GetGallery(gallery_pb2.GetGalleryRequest(name=name))
            return str(caught.value)

        with secured.channel(TOKENS[Role.WRITER]) as writing:
            create = gallery_pb2.CreateGalleryRequest(name="there")
            GalleryServiceStub(writing).CreateGallery(create)
        assert ask("there") == ask("not-there")
