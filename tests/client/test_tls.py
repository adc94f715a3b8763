"""A gateway behind TLS with tokens: who may follow and push, and whose images are whose."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trustme

from nobackfill.client import creation
from nobackfill.client.device import Device
from nobackfill.client.vault.transfer import pull, push
from nobackfill.errors import ConfigurationError, NotPermittedError, UnavailableError
from nobackfill.wire.gateway import Gateway
from tests.server.support import running
from tests.support import edge
from tests.support.edge import Setting

Become = Callable[[str], None]
ROLES = {"alice": "device", "bob": "device", "ada": "admin", "rita": "reader"}


@pytest.fixture
def gateway(world: edge.World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its address; tokens lie in files named by their owners, and the authority is known."""
    folder = tmp_path / "tls"
    folder.mkdir()
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    lines = []
    for name, role in ROLES.items():
        (folder / name).write_text(f"token-of-{name}\n")
        digest = hashlib.sha256(f"token-of-{name}".encode()).hexdigest()
        lines.append(f"{name} {role} {digest}")
    (folder / "tokens").write_text("\n".join(lines))
    (folder / "tokens").chmod(0o600)
    monkeypatch.setenv("NOBACKFILL_CA_FILE", str(folder / "ca.pem"))
    world.publish(tmp_path / "gateway" / "repo", 2)
    with running(
        tmp_path / "gateway" / "repo",
        tmp_path / "data",
        tls_cert=folder / "cert.pem",
        tls_key=folder / "key.pem",
        tokens_file=folder / "tokens",
    ) as running_gateway:
        yield running_gateway.address


@pytest.fixture
def become(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Become:
    """Use the token of somebody from now on."""
    return lambda name: monkeypatch.setenv("NOBACKFILL_TOKEN_FILE", str(tmp_path / "tls" / name))


def test_devices_follow_and_keep_their_images_apart(
    setting: Setting, gateway: str, tmp_path: Path, become: Become
) -> None:
    source = f"grpcs://{gateway}"
    root = (tmp_path / "gateway" / "repo" / "1.root.json").read_bytes()
    become("alice")
    gallery = tmp_path / "alice.sqlite"
    creation.init(gallery, source, root, lambda _: None, edge.QUIET)
    edge.fill(gallery, setting.images[0].parent)
    with Device(gallery) as device:
        assert push(device, [], None, edge.QUIET).pushed_count == 12
        become("bob")
        assert pull(device, [], tmp_path / "stolen", None, True, edge.QUIET).restored == []
        become("rita")
        with pytest.raises(NotPermittedError):
            pull(device, [], tmp_path / "stolen", None, True, edge.QUIET)
    with pytest.raises(NotPermittedError):
        edge.follow(gallery)
    become("alice")
    assert edge.follow(gallery).state == "up-to-date"


def test_an_app_shows_its_token_or_is_refused(
    setting: Setting, gateway: str, become: Become, monkeypatch: pytest.MonkeyPatch
) -> None:
    become("ada")
    with Gateway(gateway, tls=True) as app:
        app.create_gallery("photos")
        assert app.put("photos", {"one": setting.images[0]}) == {}
    become("rita")
    with Gateway(gateway, tls=True) as app:
        assert app.search("photos", image=setting.images[0]).hits[0].id == "one"
        with pytest.raises(NotPermittedError):
            app.delete("photos", ["one"])
    monkeypatch.delenv("NOBACKFILL_TOKEN_FILE")
    with Gateway(gateway, tls=True) as app, pytest.raises(NotPermittedError):
        app.search("photos", image=setting.images[0])
    authority = os.environ["NOBACKFILL_CA_FILE"]
    monkeypatch.setenv("NOBACKFILL_CA_FILE", str(Path(authority).with_name("key.pem")))
    with pytest.raises(ConfigurationError, match="found none in"):
        Gateway(gateway, tls=True)
    monkeypatch.delenv("NOBACKFILL_CA_FILE")
    with Gateway(gateway, tls=True, seconds=1) as app, pytest.raises(UnavailableError):
        app.search("photos", image=setting.images[0])
