"""A vault that lies: it may name, size, list and send what it likes, and harms nobody."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from nobackfill.client.device import Device
from nobackfill.client.gallery_file import sidecar_path
from nobackfill.client.vault import transport
from nobackfill.client.vault.keys import encrypt, new_identity
from nobackfill.client.vault.transfer import PullReport, pull
from nobackfill.errors import UnavailableError, VerificationError
from nobackfill.v1 import vault_pb2 as pb
from nobackfill.v1 import vault_pb2_grpc
from nobackfill.wire.limits import LARGEST_BLOB
from tests.support import edge
from tests.support.edge import Setting

Pages = Callable[[str], pb.ListBlobsResponse]


class EvilVault(vault_pb2_grpc.VaultServiceServicer):
    """Lists `pages(token)`, and sends `chunks` for whatever is asked for."""

    def __init__(self) -> None:
        self.pages: Pages = lambda token: pb.ListBlobsResponse()
        self.chunks: Callable[[pb.GetBlobRequest], Iterator[bytes]] = lambda request: iter(())
        self.asked: list[str] = []
        # The bytes of a blob, above which an offset is refused; None refuses none.
        self.most: int | None = None

    def ListBlobs(  # noqa: N802
        self, request: pb.ListBlobsRequest, context: grpc.ServicerContext
    ) -> pb.ListBlobsResponse:
        return self.pages(request.page_token)

    def GetBlob(  # noqa: N802
        self, request: pb.GetBlobRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GetBlobResponse]:
        self.asked.append(request.id)
        if self.most is not None and request.offset > self.most:
            context.abort(grpc.StatusCode.OUT_OF_RANGE, "the blob is shorter")
        for chunk in self.chunks(request):
            yield pb.GetBlobResponse(chunk=chunk)

    def PutBlob(  # noqa: N802
        self, request_iterator: Iterator[pb.PutBlobRequest], context: grpc.ServicerContext
    ) -> pb.PutBlobResponse:
        return pb.PutBlobResponse(received=sum(len(r.chunk) for r in request_iterator))

    def DeleteBlob(  # noqa: N802
        self, request: pb.DeleteBlobRequest, context: grpc.ServicerContext
    ) -> pb.DeleteBlobResponse:
        return pb.DeleteBlobResponse()

    def lists(self, *blobs: pb.Blob) -> None:
        """One page of these."""
        self.pages = lambda token: pb.ListBlobsResponse(blobs=blobs)


@pytest.fixture
def evil(setting: Setting) -> Iterator[EvilVault]:
    servicer = EvilVault()
    server = grpc.server(futures.ThreadPoolExecutor(4))
    vault_pb2_grpc.add_VaultServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Device(setting.gallery) as device:
        device.store.update_state({"vault": f"grpc://127.0.0.1:{port}"})
    yield servicer
    server.stop(0).wait()


def blob(blob_id: str, content: bytes, size: int | None = None) -> pb.Blob:
    digest = hashlib.sha256(content).hexdigest()
    return pb.Blob(id=blob_id, size=len(content) if size is None else size, sha256=digest)


def pulled(setting: Setting) -> PullReport:
    key = setting.gallery.parent / "key"
    new_identity(key)
    with Device(setting.gallery) as device:
        return pull(device, [], setting.gallery.parent / "restored", key, True, edge.QUIET)


def tree(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    # The lock, and what SQLite keeps while it is open, come and go by themselves.
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in files
        if path.suffix not in {".lock", ".sqlite-wal", ".sqlite-shm"}
    }


def test_an_id_that_is_a_path_touches_no_file(setting: Setting, evil: EvilVault) -> None:
    top = setting.gallery.parent
    victim = top / "diary.txt"
    victim.write_bytes(b"mine")
    new_identity(top / "key")
    before = tree(top)
    chunk = b"x" * 100
    evil.chunks = lambda request: iter([chunk])
    ids = [
        str(victim), "../diary.txt", str(setting.gallery), "", ".", "..", "a/b", "0" * 63, "0" * 65,
        "A" * 64, "0" * 64 + "\n", "0" * 63 + "\0", "g" * 64, "\x1b[2J" + "0" * 60,
    ]  # fmt: skip
    for blob_id in ids:
        evil.lists(blob(blob_id, chunk))
        with pytest.raises(VerificationError, match="64 hex digits"):
            pulled(setting)
    evil.lists(pb.Blob(id="0" * 64, size=3, sha256=f"{victim}"))
    with pytest.raises(VerificationError, match="64 hex digits"):
        pulled(setting)
    assert evil.asked == []
    assert tree(top) == before


@pytest.mark.parametrize("size", [0, LARGEST_BLOB + 1, 2**63, 2**64 - 1])
def test_a_size_that_no_blob_has_is_refused(setting: Setting, evil: EvilVault, size: int) -> None:
    evil.lists(blob("0" * 64, b"", size))
    with pytest.raises(VerificationError, match="expected a size"):
        pulled(setting)
    assert evil.asked == []


def test_a_list_without_end_is_given_up(setting: Setting, evil: EvilVault) -> None:
    same = blob("1" * 64, b"x")
    answers: list[Pages] = [
        lambda token: pb.ListBlobsResponse(blobs=[same], next_page_token="more"),
        lambda token: pb.ListBlobsResponse(next_page_token=f"{len(token) + 1:064x}"),
        lambda token: pb.ListBlobsResponse(blobs=[same, same]),
        lambda token: pb.ListBlobsResponse(
            blobs=[blob(f"{int(token or '0', 16) + 1:064x}", b"x")], next_page_token="0"
        ),
    ]
    for pages in answers:
        evil.pages = pages
        with pytest.raises(VerificationError, match="cannot be used"):
            pulled(setting)


def test_a_list_that_grows_for_ever_is_given_up(
    setting: Setting, evil: EvilVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MOST_BLOBS", 30)

    def page(token: str) -> pb.ListBlobsResponse:
        first = int(token or "0", 16) + 1
        blobs = [blob(f"{n:064x}", b"x") for n in range(first, first + 10)]
        return pb.ListBlobsResponse(blobs=blobs, next_page_token=blobs[-1].id)

    evil.pages = page
    with pytest.raises(VerificationError, match="after 30"):
        pulled(setting)


def test_more_less_other_and_broken_bytes_leave_nothing(setting: Setting, evil: EvilVault) -> None:
    content = b"age-encryption.org/v1\n" + b"x" * 1000
    evil.lists(blob("2" * 64, content))
    streams: list[Callable[[pb.GetBlobRequest], Iterator[bytes]]] = [
        lambda request: iter([content] * 5),
        lambda request: iter([content[request.offset :] + b"y"]),
        lambda request: iter([b"z" * len(content)]),
        lambda request: iter([content[:10]] if not request.offset else []),
        lambda request: iter([content[request.offset :]]),  # whole, but no age ciphertext
    ]
    for chunks in streams:
        evil.chunks = chunks
        done = pulled(setting)
        assert list(done.failed) == ["2" * 64]
        assert (done.restored, done.duplicate_count) == ([], 0)
        left = sidecar_path(setting.gallery, "inbox")
        assert [path.name for path in left.iterdir()] == []


def test_a_broken_transfer_keeps_its_bytes_in_the_inbox_only(
    setting: Setting, evil: EvilVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "STREAM_SECONDS", 0.3)
    monkeypatch.setattr(transport, "_STANDSTILLS", 2)
    content = bytes(1000)

    def part(request: pb.GetBlobRequest) -> Iterator[bytes]:
        if not request.offset:
            yield content[:10]
        futures.Future[None]().exception(1.0)

    evil.chunks = part
    evil.lists(blob("3" * 64, content))
    before = set(tree(setting.gallery.parent))
    with pytest.raises((UnavailableError, TimeoutError)):
        pulled(setting)
    new = set(tree(setting.gallery.parent)) - before - {"key"}
    assert {str(Path(name).parent) for name in new} == {f"{setting.gallery.name}.inbox"}


def test_a_blob_that_became_shorter_is_reported_and_begun_anew(
    setting: Setting, evil: EvilVault, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "STREAM_SECONDS", 0.3)
    monkeypatch.setattr(transport, "_STANDSTILLS", 2)
    key = new_identity(setting.gallery.parent / "key")
    image = setting.images[0].read_bytes()
    sealed = encrypt(image, [key.to_public()])

    def part(request: pb.GetBlobRequest) -> Iterator[bytes]:
        if not request.offset:
            yield sealed[:100]
        futures.Future[None]().exception(1.0)

    evil.chunks = part
    evil.lists(blob("4" * 64, sealed))
    with pytest.raises((UnavailableError, TimeoutError)):
        pulled(setting)
    evil.most = 50
    assert (
        "fewer than the 100 bytes that an earlier pull received" in pulled(setting).failed["4" * 64]
    )
    evil.most, evil.chunks = None, lambda request: iter([sealed[request.offset :]])
    assert len(pulled(setting).restored) == 1


def test_blobs_of_another_key_are_counted_and_the_others_restored(
    setting: Setting, evil: EvilVault
) -> None:
    key = new_identity(setting.gallery.parent / "key")
    other = new_identity(setting.gallery.parent / "other")
    images = [path.read_bytes() for path in setting.images]
    keys = [other if n % 3 else key for n in range(len(images))]
    sealed = {
        f"{n:064x}": encrypt(image, [one.to_public()])
        for n, (image, one) in enumerate(zip(images, keys, strict=True))
    }
    evil.lists(*(blob(name, data) for name, data in sealed.items()))
    evil.chunks = lambda request: iter([sealed[request.id][request.offset :]])
    done = pulled(setting)
    opened = sum(one is key for one in keys)
    assert len(done.restored) == opened
    assert len(done.failed) == len(images) - opened
    (reason,) = set(done.failed.values())
    assert "encrypted to another key" in reason
    again = pulled(setting)
    assert (len(again.restored), again.duplicate_count) == (0, opened)


def test_what_is_pulled_replaces_no_file_and_follows_no_link(
    setting: Setting, evil: EvilVault
) -> None:
    key = new_identity(setting.gallery.parent / "key")
    image = setting.images[0].read_bytes()
    sealed = encrypt(image, [key.to_public()])
    evil.lists(blob("4" * 64, sealed))
    evil.chunks = lambda request: iter([sealed[request.offset :]])
    folder = setting.gallery.parent / "restored"
    folder.mkdir()
    name = f"{hashlib.sha256(image).hexdigest()[:16]}.png"
    victim = setting.gallery.parent / "victim"
    (folder / name).symlink_to(victim)
    assert "other content" in pulled(setting).failed["4" * 64]
    assert not victim.exists()
    (folder / name).unlink()
    (folder / name).write_bytes(b"mine")
    assert "other content" in pulled(setting).failed["4" * 64]
    assert (folder / name).read_bytes() == b"mine"
