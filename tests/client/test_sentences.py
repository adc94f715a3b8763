"""What a person reads when something around the device is wrong: one sentence, and what to do."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from tests.client.test_cli import COMMAND, run
from tests.server.support import running
from tests.support import edge
from tests.support.edge import Setting

LIBRARY = ("Pool(", "object at 0x", "Max retries", "ipv4:", ".cc:", "SSL_ERROR", "Errno", "UNKNOWN")


def refused(gallery: Path, *arguments: str | Path, code: int, **environment: str) -> str:
    """The sentence of a refusal: one line, none of it a library's."""
    done = subprocess.run(
        [COMMAND, *arguments],
        env={**os.environ, "NOBACKFILL_GALLERY": str(gallery), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == code, done.stderr
    (line,) = done.stderr.splitlines()
    for part in LIBRARY:
        assert part not in line
    return line


@pytest.fixture
def tls(
    world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, Path]]:
    """A gateway that wants a token, and the certificate of its authority."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    (tmp_path / "tokens").write_text(f"ada admin {'0' * 64}\n")
    (tmp_path / "tokens").chmod(0o600)
    world.publish(tmp_path / "gateway" / "repo", 1)
    with running(
        tmp_path / "gateway" / "repo",
        tmp_path / "data",
        tls_cert=tmp_path / "cert.pem",
        tls_key=tmp_path / "key.pem",
        tokens_file=tmp_path / "tokens",
    ) as gateway:
        yield f"grpcs://{gateway.address}", tmp_path / "ca.pem"


@pytest.mark.long
def test_certificates_and_tokens(setting: Setting, tls: tuple[str, Path]) -> None:
    address, authority = tls
    sync = ("sync", "--from", address)
    assert "NOBACKFILL_CA_FILE" in refused(setting.gallery, *sync, code=69)
    known = {"NOBACKFILL_CA_FILE": str(authority)}
    assert "NOBACKFILL_TOKEN_FILE" in refused(setting.gallery, *sync, code=77, **known)
    plain = ("sync", "--from", address.replace("grpcs", "grpc"))
    assert "grpcs://" in refused(setting.gallery, *plain, code=69)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("http://127.0.0.1:1", "nothing answers there"),
        ("grpc://127.0.0.1:1", "nothing listens there"),
        ("http://no.such.host.invalid", "no host of that name"),
        ("grpc://no.such.host.invalid:50051", "no host of that name"),
    ],
)
def test_a_host_that_is_not_there(setting: Setting, source: str, said: str) -> None:
    assert said in refused(setting.gallery, "sync", "--from", source, code=69)


def test_a_file_that_the_host_lacks(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    (setting.repo / "upgrade_1_to_2" / "1" / "model.onnx").unlink()
    with edge.http_host(setting.repo) as address:
        line = refused(setting.gallery, "sync", "--from", address, code=66)
    assert "upgrade_1_to_2/1/model.onnx" in line
    assert "is missing or incomplete" in line


def test_a_wrong_gallery_file(setting: Setting, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    subprocess.run(["sqlite3", other, "CREATE TABLE t (a)"], check=True)
    for gallery, code, words in (
        (other, 65, "another program"),
        (setting.images[0], 65, "another kind"),
        (tmp_path / "none.sqlite", 66, "there is no gallery"),
        (tmp_path, 66, "there is no gallery"),
    ):
        (line,) = run(gallery, "list", code=code).stderr.splitlines()
        assert words in line and not any(part in line for part in LIBRARY)
    run(setting.gallery, "list")
