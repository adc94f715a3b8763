"""Streams of callers with tokens: what each role may hold, how old they grow, and their end with
their token."""

import dataclasses
import hashlib
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from nobackfill.server.grpc import rpc
from nobackfill.v1 import gallery_pb2, release_pb2, vault_pb2
from nobackfill.wire.connection import WATCH_AGAIN_TRAILER
from tests.server.conftest import Stages, publish_stage
from tests.server.guarded import Guarded, few_watches
from tests.server.peers import Peer, prefixed
from tests.server.support import Client, images, random_id, running
from tests.support.blocks import png
from tests.support.waiting import wait_until

ROLES = {
    "admin": "admin", "writer": "writer", "phone-1": "device", "phone-2": "device",
    "app-1": "reader", "app-2": "reader", "other": "reader",
}  # fmt: skip
PUT_BLOB = "/nobackfill.v1.VaultService/PutBlob"
WATCH = "/nobackfill.v1.ReleaseService/WatchReleases"
OPEN = "nobackfill_calls_open"


def write_tokens(path: Path, names: Iterable[str], expires: str = "") -> Path:
    """Each token is its name."""
    digest = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    lines = [f"{name} {ROLES[name]} {digest[name]} {expires}\n" for name in names]
    new = path.with_name("tokens.new")
    new.write_text("".join(lines))
    new.rename(path)
    return path


@pytest.fixture
def guarded(stages: Stages, tmp_path: Path) -> Iterator[Guarded]:
    tokens = write_tokens(tmp_path / "tokens", ROLES)
    with few_watches(), running(stages[1], tmp_path / "data", tokens_file=tokens) as gateway:
        guarded = Guarded(gateway.address, gateway.metrics_address)
        with guarded.client("admin") as admin:
            admin.create_gallery("g")
        yield guarded


def hold(guarded: Guarded, stack: ExitStack, names: Iterable[str], method: str, each: int) -> None:
    """Open so many calls of each token, which then say nothing."""
    for name in names:
        peer = stack.enter_context(Peer(guarded.address))
        for _ in range(each):
            stream = peer.begin(method, name)
            if method == WATCH:
                peer.send(stream, prefixed(b""))


def test_devices_that_send_nothing_leave_writers_their_places(guarded: Guarded) -> None:
    with ExitStack() as stack, guarded.client("writer") as writer:
        hold(guarded, stack, ("phone-1", "phone-2"), PUT_BLOB, 16)
        wait_until(lambda: guarded.series(f'{OPEN}{{lane="transfers"}}') == 32, "none is open")
        picture = png(images(1)[0])
        with ThreadPoolExecutor(20) as pool:
            stored = [pool.submit(writer.put, "g", {f"i{number}": picture}) for number in range(20)]
            assert [future.result() for future in stored] == [{}] * 20
        # As many as they can get: a writer and an admin are served all the same.
        hold(guarded, stack, ("phone-1", "phone-2"), PUT_BLOB, 40)
        wait_until(lambda: guarded.series(f'{OPEN}{{lane="transfers"}}') >= 48, "they got fewer")
        assert writer.put("g", {"last": picture}) == {}
        with guarded.client("admin") as admin:
            assert list(admin.fetch_file("timestamp.json"))


def test_watchers_keep_nobody_from_activating(guarded: Guarded) -> None:
    with ExitStack() as stack, guarded.client("admin") as admin:
        hold(guarded, stack, ("app-1", "app-2"), WATCH, 24)
        wait_until(lambda: guarded.series(f'{OPEN}{{lane="watches"}}') == 48, "48 apps watch")
        assert admin.swap(1).phase == release_pb2.PHASE_DONE
        # As many as they can get.
        hold(guarded, stack, ("app-1", "app-2", "other"), WATCH, 60)
        wait_until(lambda: guarded.series(f'{OPEN}{{lane="watches"}}') >= 52, "they got fewer")
        assert admin.swap(1).phase == release_pb2.PHASE_DONE
        assert next(admin.watch_releases())
        with guarded.client("writer") as writer:
            assert next(writer.watch_releases())


@pytest.mark.long
def test_an_old_watch_ends_and_our_client_watches_again(
    stages: Stages, repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    young = {
        **rpc.STREAM_LANES,
        "watches": dataclasses.replace(rpc.STREAM_LANES["watches"], max_stream_age_s=1),
    }
    monkeypatch.setattr(rpc, "STREAM_LANES", young)
    with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
        alone = client.raw.releases.WatchReleases(release_pb2.WatchReleasesRequest())
        assert len(list(alone)) == 1
        assert alone.code() is grpc.StatusCode.OK
        assert WATCH_AGAIN_TRAILER in dict(alone.trailing_metadata())
        guarded = Guarded(gateway.address, gateway.metrics_address)
        handled = 'grpc_server_handled_total{grpc_code="OK",grpc_method="WatchReleases"'
        seen: list[list[int]] = []

        def watch() -> None:
            for releases in client.watch_releases():
                seen.append([release.number for release in releases])
                if len(releases) == 2:
                    return

        watching = threading.Thread(target=watch)
        watching.start()
        wait_until(lambda: guarded.series(handled) >= 3, "the watch does not grow old")
        publish_stage(repo, stages[2])
        watching.join(60)
        # A release may change its state as it comes in; nothing is told twice.
        assert [numbers for numbers in seen if numbers == [1]] == [[1]], seen
        assert seen[-1] == [1, 2], seen


@pytest.mark.long
@pytest.mark.parametrize("expires", [False, True], ids=["removed", "expired"])
def test_streams_end_with_their_token(guarded: Guarded, tmp_path: Path, expires: bool) -> None:
    blob = b"age-encryption.org/v1\n" + bytes(24 * 2**20)
    digest = hashlib.sha256(blob).hexdigest()
    named = vault_pb2.Blob(id=random_id(1), size=len(blob), sha256=digest)
    pieces = [blob[start : start + 2**20] for start in range(0, len(blob), 2**20)]
    over, codes = threading.Event(), dict[str, grpc.StatusCode]()

    def idle(first: Any) -> Iterator[Any]:
        yield first
        over.wait(60)

    def busy() -> Iterator[gallery_pb2.PutItemsRequest]:
        for number in range(600):
            item = gallery_pb2.PutItem(id=f"b{number}", image=png(images(1)[0]))
            yield gallery_pb2.PutItemsRequest(gallery="g", items=[item])
            if over.wait(0.1):
                return

    def end(name: str, call: Any) -> None:
        """Read to the end."""
        if name != "PutBlob":
            with suppress(grpc.RpcError):
                list(call)
        codes[name] = call.code()

    with ExitStack() as stack:
        app, writer, phone = (
            stack.enter_context(guarded.client(name)).raw for name in ("app-1", "writer", "phone-1")
        )
        sent = [vault_pb2.PutBlobRequest(blob=named, chunk=pieces[0])]
        sent += [vault_pb2.PutBlobRequest(chunk=piece) for piece in pieces[1:]]
        phone.vault.PutBlob(iter(sent))
        put = gallery_pb2.PutItemsRequest(gallery="g")
        other = vault_pb2.Blob(id=random_id(2), size=len(blob), sha256=digest)
        begun = vault_pb2.PutBlobRequest(blob=other, chunk=pieces[0])
        # The answers are not read: the stream waits for its client.
        got = phone.vault.GetBlob(vault_pb2.GetBlobRequest(id=random_id(1)))
        next(got)
        streams = {
            "WatchReleases": app.releases.WatchReleases(release_pb2.WatchReleasesRequest()),
            "idle PutItems": writer.galleries.PutItems(idle(put)),
            "PutItems": writer.galleries.PutItems(busy()),
            "PutBlob": phone.vault.PutBlob.future(idle(begun)),
        }
        reading = [threading.Thread(target=end, args=one) for one in streams.items()]
        for thread in reading:
            thread.start()
        wait_until(lambda: guarded.series(f'{OPEN}{{lane="transfers"}}') == 4, "not all are open")
        soon = (datetime.now(UTC) + timedelta(seconds=2)).isoformat() if expires else ""
        write_tokens(tmp_path / "tokens", ROLES if expires else ["admin"], soon)
        ended = time.monotonic() + (2 if expires else 0)
        for thread in reading:
            thread.join(30)
        took = time.monotonic() - ended
        over.set()
        assert took < 15, (took, codes)
        assert codes["WatchReleases"] is grpc.StatusCode.UNAUTHENTICATED
        assert codes["PutItems"] is grpc.StatusCode.UNAUTHENTICATED
        assert set(codes) == set(streams)
        assert grpc.StatusCode.OK not in codes.values()
        with pytest.raises(grpc.RpcError):
            list(got)
