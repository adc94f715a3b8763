"""The vault: ciphertext only, whole or resumable, each owner's apart."""

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pyrage
import pytest
from pyrage import x25519

from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    OutOfRangeError,
    QuotaExceededError,
    TooLargeError,
)
from nobackfill.server.vault import UNFINISHED_SECONDS, Blob, VaultBlobs
from nobackfill.v1 import vault_pb2
from nobackfill.wire.limits import LARGEST_BLOB
from tests.server.support import Client, random_id, refused

QUOTA = 10 * 2**20
KEY = x25519.Identity.generate()


def sealed(size: int = 1000, seed: int = 0) -> bytes:
    """Age ciphertext, as a device makes it."""
    return bytes(pyrage.encrypt(bytes([seed]) * size, [KEY.to_public()]))


def blob_of(data: bytes, number: int = 1) -> Blob:
    return Blob(random_id(number), len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def vault(tmp_path: Path) -> VaultBlobs:
    return VaultBlobs(tmp_path / "vault", QUOTA)


def read(vault: VaultBlobs, blob_id: str, offset: int = 0, owner: str = "a") -> bytes:
    return b"".join(vault.get(owner, blob_id, offset)[1])


def test_a_blob_comes_back(vault: VaultBlobs) -> None:
    data = sealed(700_000)
    blob = blob_of(data)
    assert vault.put("a", blob, 0, [data[:10], data[10:500_000], b"", data[500_000:]]) == len(data)
    assert read(vault, blob.id) == data
    assert read(vault, blob.id, 600_000) == data[600_000:]
    assert vault.put("a", blob, 0, [data]) == len(data)
    assert vault.list_page("a", "") == [blob]


def test_an_upload_resumes_where_it_broke_off(vault: VaultBlobs) -> None:
    data = sealed()
    blob = blob_of(data)

    def broken() -> Iterator[bytes]:
        yield data[:300]
        yield data[300:400]
        raise ConnectionError

    with pytest.raises(ConnectionError):
        vault.put("a", blob, 0, broken())
    with pytest.raises(NotFoundError):
        vault.get("a", blob.id, 0)
    assert vault.put("a", blob, 0, []) == 400
    with pytest.raises(OutOfRangeError, match="400"):
        vault.put("a", blob, 300, [data[300:]])
    assert vault.put("a", blob, 400, [data[400:]]) == len(data)
    assert read(vault, blob.id) == data


@pytest.mark.parametrize(
    "data",
    [b"\xff\xd8\xff" + b"x" * 1000, b"\x89PNG\r\n" + b"x" * 1000, b"age-encryption.org/v2\n" * 9],
)
def test_plaintext_is_refused_before_it_is_written(
    vault: VaultBlobs, tmp_path: Path, data: bytes
) -> None:
    for number, cut in enumerate((0, 1, 5, 21)):
        with pytest.raises(InvalidInputError, match="age"):
            vault.put("a", blob_of(data, number), 0, [data[:cut], data[cut:]])
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert all(len(piece) < len(b"age-encryption.org/v1") for piece in stored)


def test_other_bytes_than_announced_are_dropped(vault: VaultBlobs) -> None:
    data = sealed()
    blob = blob_of(data)
    tampered = data[:-1] + bytes([data[-1] ^ 1])
    with pytest.raises(InvalidInputError, match="SHA-256"):
        vault.put("a", blob, 0, [tampered])
    assert vault.put("a", blob, 0, [data]) == len(data)
    with pytest.raises(TooLargeError):
        vault.put("a", blob_of(data, 2), 0, [data, b"more"])


def test_an_id_is_taken_once(vault: VaultBlobs) -> None:
    data, other = sealed(seed=1), sealed(seed=2)
    vault.put("a", blob_of(data), 0, [data])
    with pytest.raises(AlreadyExistsError):
        vault.put("a", blob_of(other), 0, [other])
    vault.put("b", blob_of(other), 0, [other])
    assert read(vault, random_id(1), owner="b") == other


def test_owners_do_not_see_each_other(vault: VaultBlobs) -> None:
    data = sealed()
    vault.put("a", blob_of(data), 0, [data])
    assert vault.list_page("b", "") == []
    with pytest.raises(NotFoundError):
        vault.get("b", random_id(1), 0)
    with pytest.raises(NotFoundError):
        vault.delete("b", random_id(1))
    vault.delete("a", random_id(1))
    assert vault.list_page("a", "") == []


def test_two_uploads_of_one_blob(vault: VaultBlobs) -> None:
    data = sealed()
    blob = blob_of(data)

    def meanwhile() -> Iterator[bytes]:
        yield data[:100]
        with pytest.raises(BusyError):
            vault.put("a", blob, 100, [data[100:]])
        yield data[100:]

    assert vault.put("a", blob, 0, meanwhile()) == len(data)


@pytest.mark.parametrize(
    "blob",
    [
        Blob("../" + "0" * 61, 100, "0" * 64),
        Blob("0" * 63, 100, "0" * 64),
        Blob("0" * 64, 100, "x" * 64),
        Blob("0" * 64, 5, "0" * 64),
        Blob("0" * 64, LARGEST_BLOB + 1, "0" * 64),
    ],
)
def test_bad_names_and_sizes(vault: VaultBlobs, blob: Blob) -> None:
    with pytest.raises(InvalidInputError):
        vault.put("a", blob, 0, [b"age-encryption.org/v1\n"])


def test_pages(vault: VaultBlobs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nobackfill.server.vault.PAGE", 7)
    blobs = [blob_of(sealed(10, i % 250), i) for i in range(30)]
    for i, blob in enumerate(blobs):
        data = sealed(10, i % 250)
        blob = Blob(blob.id, len(data), hashlib.sha256(data).hexdigest())
        vault.put("a", blob, 0, [data])
    seen: list[str] = []
    while page := vault.list_page("a", seen[-1] if seen else ""):
        assert len(page) <= 7
        seen += [blob.id for blob in page]
    assert seen == sorted(blob.id for blob in blobs)


def test_a_blob_that_is_deleted_while_it_is_listed_or_opened_is_not_there(
    vault: VaultBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = [sealed(seed=i) for i in range(3)]
    blobs = [blob_of(data, i) for i, data in enumerate(contents)]
    for blob, data in zip(blobs, contents, strict=True):
        vault.put("a", blob, 0, [data])
    listed, stat = blobs[1], Path.stat

    def deleted_first(path: Path, **follow: bool) -> os.stat_result:
        if path.name.startswith(listed.id):
            path.unlink(missing_ok=True)
        return stat(path, **follow)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", deleted_first)
        assert {blob.id for blob in vault.list_page("a", "")} == {
            b.id for b in blobs if b != listed
        }

    def deleted_after(path: Path, **follow: bool) -> os.stat_result:
        found = stat(path, **follow)
        if path.name.startswith(opened.id):
            path.unlink()
        return found

    opened = next(blob for blob in blobs if blob != listed)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", deleted_after)
        with pytest.raises(NotFoundError):
            vault.get("a", opened.id, 0)


def test_over_the_wire(shared: Client) -> None:
    data = sealed(600_000)
    blob = blob_of(data, 99)
    message = vault_pb2.Blob(id=blob.id, size=blob.size, sha256=blob.sha256)
    assert shared.put_blob(message, [data[:1000]]) == shared.received_bytes(message) == 1000
    assert shared.put_blob(message, [data[1000:300_000], data[300_000:]], 1000) == len(data)
    assert b"".join(shared.get_blob(blob.id)) == data
    request = vault_pb2.GetBlobRequest(id=blob.id)
    assert next(shared.raw.vault.GetBlob(request, timeout=30)).blob == message
    assert message in shared.list_blobs().blobs
    shared.delete_blob(blob.id)
    with refused(NotFoundError):
        list(shared.get_blob(blob.id))
    with refused(InvalidInputError):
        shared.raw.vault.PutBlob(iter([]), timeout=30)


def test_a_name_has_a_quota(vault: VaultBlobs, tmp_path: Path) -> None:
    """What is there counts, whole or in part; what is deleted or refused does not."""
    data = sealed(3 * 2**20 - 4096)
    first, second = blob_of(data, 1), blob_of(data, 2)
    third, fourth = blob_of(data, 3), blob_of(data, 4)
    for blob in (first, second):
        vault.put("a", blob, 0, [data])

    def broken() -> Iterator[bytes]:
        yield data[: 2**20]
        # While it comes, all of it is promised.
        with pytest.raises(QuotaExceededError, match="ask the operator"):
            vault.put("a", fourth, 0, [])
        raise ConnectionError

    with pytest.raises(ConnectionError):
        vault.put("a", third, 0, broken())
    assert vault.put("a", fourth, 0, [data[: 2**20]]) == 2**20
    assert vault.put("a", third, 2**20, [data[2**20 :]]) == len(data)
    with pytest.raises(QuotaExceededError):
        vault.put("a", fourth, 2**20, [data[2**20 :]])
    # Another name has a quota of its own, and a gateway that starts again counts the same.
    vault.put("b", fourth, 0, [data])
    again = VaultBlobs(tmp_path / "vault", QUOTA)
    with pytest.raises(QuotaExceededError):
        again.put("a", fourth, 2**20, [data[2**20 :]])
    assert again.put("a", first, 0, [data]) == len(data)
    again.delete("a", first.id)
    assert again.put("a", fourth, 2**20, [data[2**20 :]]) == len(data)


def test_uploads_that_nobody_ends_make_room(vault: VaultBlobs) -> None:
    """They held the quota for ever; no call lists them, so that the refusal names them."""
    data, more = sealed(3 * 2**20), sealed(11 * 2**19)
    left, going, new = blob_of(data, 1), blob_of(data, 2), blob_of(more, 3)
    vault.put("a", blob_of(data, 4), 0, [data])
    for blob in (left, going):
        vault.put("a", blob, 0, [data[: 2**20]])
    (part,) = vault._owner_folder("a").glob(f"*/{left.id}.*.part")
    os.utime(part, (0, time.time() - UNFINISHED_SECONDS + 60))
    with pytest.raises(QuotaExceededError, match="belong to 2 unfinished uploads") as refusal:
        vault.put("a", new, 0, [more])
    assert left.id in str(refusal.value) and going.id in str(refusal.value)
    os.utime(part, (0, time.time() - UNFINISHED_SECONDS - 60))
    assert vault.put("a", new, 0, [more]) == len(more)
    assert not part.exists()
    # Younger uploads stay, and go on once there is room.
    vault.delete("a", new.id)
    assert vault.put("a", going, 2**20, [data[2**20 :]]) == len(data)


def test_a_small_blob_counts_what_a_file_takes(tmp_path: Path) -> None:
    vault = VaultBlobs(tmp_path / "vault", 3 * 4096)
    data = sealed(10)
    for number in range(3):
        vault.put("a", blob_of(data, number), 0, [data])
    with pytest.raises(QuotaExceededError):
        vault.put("a", blob_of(data, 3), 0, [data])


def test_names_that_end_in_a_newline_are_none(vault: VaultBlobs, shared: Client) -> None:
    data = sealed()
    blob = blob_of(data)
    for bad in (
        Blob(f"{blob.id}\n", blob.size, blob.sha256),
        Blob(blob.id, blob.size, f"{blob.sha256}\n"),
    ):
        with pytest.raises(InvalidInputError):
            vault.put("a", bad, 0, [data])
    with refused(InvalidInputError):
        shared.create_gallery("photos\n")
