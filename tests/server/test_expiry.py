"""Certificates that change under a gateway, and what it says of when things expire."""

import datetime
import hashlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.listener import Certificates
from nobackfill.wire.gateway import Gateway
from tests.server.conftest import Stages
from tests.server.support import running
from tests.support.waiting import wait_until

DAY = datetime.timedelta(days=1)


def write(folder: Path, authority: trustme.CA, days: int = 30) -> None:
    """A certificate of `authority` and its key, each replaced as a whole."""
    until = datetime.datetime.now(datetime.UTC) + days * DAY
    issued = authority.issue_cert("127.0.0.1", not_after=until)
    for name, pem in (
        ("key.pem", issued.private_key_pem),
        ("cert.pem", issued.cert_chain_pems[0]),
    ):
        pem.write_to_path(folder / f"new-{name}")
        (folder / f"new-{name}").rename(folder / name)


def trusts(address: str, authority: trustme.CA) -> bool:
    """Whether a client that knows `authority` alone is answered, over a connection of its own."""
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(address, credentials, options) as channel:
        try:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.RpcError:
            return False
    return True


@contextmanager
def secured(stages: Stages, folder: Path, authority: trustme.CA) -> Iterator[GatewayServer]:
    write(folder, authority, days=30)
    soon = datetime.datetime.now(datetime.UTC) + 3 * DAY
    lines = [
        f"soon reader {hashlib.sha256(b'soon').hexdigest()} {soon.isoformat()}",
        f"past reader {hashlib.sha256(b'past').hexdigest()} 2020-01-01T00:00:00+00:00",
        f"ever reader {hashlib.sha256(b'ever').hexdigest()}",
    ]
    (folder / "tokens").write_text("\n".join(lines))
    with running(
        stages[1], folder / "data", tls_cert=folder / "cert.pem", tls_key=folder / "key.pem",
        tokens_file=folder / "tokens",
    ) as gateway:  # fmt: skip
        yield gateway


@pytest.mark.long
def test_a_client_learns_why_a_certificate_is_refused(
    stages: Stages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An expired one needs another remedy than one of an unknown authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    monkeypatch.setenv("NOBACKFILL_CA_FILE", str(tmp_path / "ca.pem"))

    def refusal(address: str) -> str:
        with Gateway(address, tls=True, seconds=1) as app, pytest.raises(UnavailableError) as error:
            list(app.list_galleries())
        return str(error.value)

    with secured(stages, tmp_path, authority) as gateway:
        port = gateway.address.rpartition(":")[2]
        assert "does not have this host name" in refusal(f"localhost:{port}")
        write(tmp_path, authority, days=-1)
        wait_until(lambda: not trusts(gateway.address, authority), what="the expired one is in use")
        assert "its certificate has expired" in refusal(gateway.address)
        write(tmp_path, trustme.CA())
        wait_until(lambda: "unknown authority" in refusal(gateway.address), what="another one is")


def test_certificates_follow_their_files(stages: Stages, tmp_path: Path) -> None:
    first, second = trustme.CA(), trustme.CA()
    with secured(stages, tmp_path, first) as gateway:
        assert trusts(gateway.address, first)
        assert not trusts(gateway.address, second)
        # Half replaced, then garbage: the old one goes on.
        other = second.issue_cert("127.0.0.1")
        other.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        for _ in range(3):
            assert trusts(gateway.address, first)
        (tmp_path / "cert.pem").write_text("nothing")
        assert trusts(gateway.address, first)
        write(tmp_path, second)
        wait_until(lambda: trusts(gateway.address, second), "the new certificate is shown")
        assert not trusts(gateway.address, first)


def test_days_until_things_expire(stages: Stages, tmp_path: Path) -> None:
    with secured(stages, tmp_path, trustme.CA()) as gateway:
        found = days(gateway)
        assert found['nobackfill_certificate_expires_days{certificate="server"}'] == pytest.approx(
            30, abs=0.1
        )
        assert found["nobackfill_token_expires_days"] == pytest.approx(3, abs=0.1)
        roles = ("root", "targets", "snapshot", "timestamp")
        metadata = [found[f'nobackfill_metadata_expires_days{{role="{role}"}}'] for role in roles]
        assert metadata[0] > metadata[2] > 1
        # What was renewed, or cannot be read, is told at the next look.
        (tmp_path / "cert.pem").unlink()
        assert not [name for name in days(gateway) if "certificate" in name]


def days(gateway: GatewayServer) -> dict[str, float]:
    with urlopen(f"http://{gateway.metrics_address}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines)
        if "_expires_days" in name and not name.startswith("#")
    }


def test_files_that_are_no_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    write(tmp_path, authority)
    shutil.copy(tmp_path / "key.pem", tmp_path / "old.pem")
    write(tmp_path, authority)
    for cert, key in (("cert.pem", "old.pem"), ("cert.pem", "cert.pem"), ("none.pem", "key.pem")):
        with pytest.raises(ConfigurationError, match=r"\.pem"):
            Certificates(tmp_path / cert, tmp_path / key, None)
    Certificates(tmp_path / "cert.pem", tmp_path / "key.pem", None)
    with pytest.raises(ConfigurationError, match=r"--tls-client-ca \S+key\.pem: expected the cert"):
        Certificates(tmp_path / "cert.pem", tmp_path / "key.pem", tmp_path / "key.pem")
