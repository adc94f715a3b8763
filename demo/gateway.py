"""The gateway's calls as an app makes them: gRPC stubs and nothing else of ours."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import grpc

from demo.errors import DemoError
from nobackfill.v1 import (
    gallery_pb2,
    gallery_pb2_grpc,
    release_pb2,
    release_pb2_grpc,
    search_pb2,
    search_pb2_grpc,
)

# Seconds for one call of a demo on a busy machine.
DEADLINE = 60
# Images in one message of PutItems.
BATCH = 32
# The most hits that one Search gives.
MAX_HITS = 1000


def images_in(folder: Path) -> dict[str, Path]:
    """The images of a folder of class folders, by their path CLASS/NAME."""
    return {f"{path.parent.name}/{path.name}": path for path in sorted(folder.glob("*/*"))}


def connect(address: str) -> grpc.Channel:
    # Retries would hide the failures that the demo counts.
    return grpc.insecure_channel(
        address,
        options=[("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)],
    )


def create(channel: grpc.Channel, name: str) -> None:
    """Make an empty gallery, in place of one that a killed run left behind."""
    galleries = gallery_pb2_grpc.GalleryServiceStub(channel)
    present = galleries.ListGalleries(gallery_pb2.ListGalleriesRequest(), timeout=DEADLINE)
    if name in {gallery.name for gallery in present.galleries}:
        galleries.DeleteGallery(gallery_pb2.DeleteGalleryRequest(name=name), timeout=DEADLINE)
    galleries.CreateGallery(gallery_pb2.CreateGalleryRequest(name=name), timeout=DEADLINE)


def put(
    channel: grpc.Channel, name: str, folder: Path, stored: Callable[[int], object]
) -> list[str]:
    """Put every image of a folder; the ids, CLASS/NAME. Raises DemoError if one is refused."""
    images = images_in(folder)

    def requests() -> Iterator[gallery_pb2.PutItemsRequest]:
        ids = list(images)
        for start in range(0, len(ids), BATCH):
            items = [
                gallery_pb2.PutItem(id=id_, image=images[id_].read_bytes())
                for id_ in ids[start : start + BATCH]
            ]
            yield gallery_pb2.PutItemsRequest(gallery=name, items=items)

    answers = gallery_pb2_grpc.GalleryServiceStub(channel).PutItems(requests(), timeout=600)
    for answer in answers:
        for error in answer.errors:
            raise DemoError(f"the gateway refused {error.id}: {error.message}", 65)
        stored(answer.stored)
    return list(images)


def ask(
    channel: grpc.Channel, name: str, queries: Mapping[str, Path], k: int
) -> dict[str, list[str]]:
    """Search for every query's image; the ids of its k nearest items, nearest first."""
    search = search_pb2_grpc.SearchServiceStub(channel)
    answers = {}
    for query, path in queries.items():
        request = search_pb2.SearchRequest(
            gallery=name, query=search_pb2.Query(image=path.read_bytes()), k=min(k, MAX_HITS)
        )
        answers[query] = [hit.id for hit in search.Search(request, timeout=DEADLINE).hits]
    return answers


def releases(channel: grpc.Channel) -> dict[int, release_pb2.ReleaseState]:
    """The published releases and what the gateway does with each."""
    listed = release_pb2_grpc.ReleaseServiceStub(channel).ListReleases(
        release_pb2.ListReleasesRequest(), timeout=DEADLINE
    )
    return {release.number: release.state for release in listed.releases}


def active_release(channel: grpc.Channel) -> int | None:
    """The release that answers now, None before there is one."""
    states = releases(channel)
    return next((n for n, s in states.items() if s == release_pb2.RELEASE_STATE_ACTIVE), None)


def settled_release(channel: grpc.Channel) -> int | None:
    """The release that answers, once an activation that a killed run began has come to its end."""
    deadline = time.monotonic() + DEADLINE
    while release_pb2.RELEASE_STATE_ACTIVATING in releases(channel).values():
        if time.monotonic() > deadline:
            raise DemoError(
                f"an activation has not ended after {DEADLINE} s; see the gateway's log"
            )
        time.sleep(0.2)
    return active_release(channel)


def roll_back(channel: grpc.Channel) -> None:
    """Return to the release that served before."""
    release_pb2_grpc.ReleaseServiceStub(channel).RollbackRelease(
        release_pb2.RollbackReleaseRequest(confirm=True), timeout=DEADLINE
    )


def activate(
    channel: grpc.Channel, release: int, rollout: release_pb2.Rollout
) -> Iterator[release_pb2.ActivateReleaseResponse]:
    """Activate a release and give each report. Raises DemoError where the release failed."""
    request = release_pb2.ActivateReleaseRequest(number=release, rollout=rollout)
    for report in release_pb2_grpc.ReleaseServiceStub(channel).ActivateRelease(
        request, timeout=600
    ):
        if report.phase == release_pb2.PHASE_FAILED:
            raise DemoError(f"release {release} was not activated: {report.message}")
        yield report
