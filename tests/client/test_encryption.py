"""Encryption on the device: who can open what, and what damage leaves behind."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyrage.x25519 import Identity

from nobackfill.client.vault import keys
from nobackfill.errors import ConfigurationError, VerificationError

# age encrypts in chunks of 64 KiB, each with a tag of 16 bytes.
CHUNK = 65536 + 16


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return keys.new_identity(tmp_path / "identity")


def test_every_recipient_opens_alone(tmp_path: Path, identity: Identity) -> None:
    recovery = keys.new_identity(tmp_path / "recovery")
    source = tmp_path / "blob"
    source.write_bytes(keys.encrypt(b"picture", [identity.to_public(), recovery.to_public()]))
    assert keys.decrypt(source, [identity]) == b"picture"
    assert keys.decrypt(source, [recovery]) == b"picture"
    with pytest.raises(VerificationError):
        keys.decrypt(source, [Identity.generate()])


@settings(max_examples=20, deadline=None)
@given(plain=st.binary(max_size=200_000))
def test_round_trip(plain: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("crypto")
    identity = Identity.generate()
    sealed = keys.encrypt(plain, [identity.to_public()])
    assert sealed.startswith(keys.MAGIC)
    (folder / "blob").write_bytes(sealed)
    assert keys.decrypt(folder / "blob", [identity]) == plain


def test_damage_gives_no_plaintext(tmp_path: Path, identity: Identity) -> None:
    plain = b"CANARY" + os.urandom(3 * 65536)
    sealed = keys.encrypt(plain, [identity.to_public()])
    assert b"CANARY" not in sealed
    header = len(sealed) - len(plain) - 4 * 16
    edges = [header + n * CHUNK + d for n in range(4) for d in (-1, 0, 1)]
    damaged = [sealed[:length] for length in [0, 10, *edges, len(sealed) - 1]]
    damaged += [sealed[:at] + bytes([sealed[at] ^ 1]) + sealed[at + 1 :] for at in edges if at >= 0]
    damaged += [
        sealed + b"\0",
        sealed[: header + CHUNK] + sealed[header + 2 * CHUNK :],
    ]
    for data in damaged:
        (tmp_path / "blob").write_bytes(data)
        with pytest.raises(VerificationError):
            keys.decrypt(tmp_path / "blob", [identity])


def test_identity_is_private_and_kept(tmp_path: Path, identity: Identity) -> None:
    path = tmp_path / "identity"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert str(keys.new_identity(path)) == str(identity)
    path.chmod(0o644)
    with pytest.raises(ConfigurationError, match="chmod 600"):
        keys.read_identity(path)


@pytest.mark.parametrize("text", ["", "AGE-SECRET-KEY-1BROKEN", "age1abc"])
def test_a_wrong_identity_is_refused_without_being_quoted(tmp_path: Path, text: str) -> None:
    path = tmp_path / "identity"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match="AGE-SECRET-KEY-1\\.\\.\\.") as caught:
        keys.read_identity(path)
    assert "BROKEN" not in str(caught.value)
    with pytest.raises(ConfigurationError):
        keys.read_recipient(text)


def test_ciphertext_is_the_age_format(tmp_path: Path, identity: Identity) -> None:
    """pyrage's own decryption in another process, given only the identity file, reads it."""
    (tmp_path / "blob").write_bytes(keys.encrypt(b"picture", [identity.to_public()]))
    code = (
        "import sys, pyrage; key = open(sys.argv[1]).read().split()[-1];"
        "identity = pyrage.x25519.Identity.from_str(key);"
        "sys.stdout.buffer.write(pyrage.decrypt(open(sys.argv[2], 'rb').read(), [identity]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "identity"), str(tmp_path / "blob")]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"picture"
