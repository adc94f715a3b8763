"""`python -m bench.watchers`: memory and threads of one gateway that many watch.

A gateway process serves a small release. Clients in this process open connections to it and watch
its releases on each: WatchReleases, which a device or an app keeps open. Then a release is
published, and each watcher is told. Figures are the gateway's own, from /proc.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import grpc.aio
import typer

from bench import record
from bench.harness import Row, Table
from bench.loaded import processor_seconds
from nobackfill.v1 import release_pb2
from nobackfill.v1.release_pb2_grpc import ReleaseServiceStub
from tests.server import process
from tests.support import trials
from tests.support.blocks import publish_block_release

_IDLE_S = 10.0
# Calls that come together: of 3,000 that wait, gRPC's core turns the others away.
_AT_ONCE = 500


def main(
    watchers: Annotated[
        int, typer.Option(help="Number of streams that watch the gateway.")
    ] = 10_000,
    connections: Annotated[
        int, typer.Option(help="Number of connections that share the streams, at most 512.")
    ] = 500,
) -> None:
    """Measure one gateway before, while and after it is watched."""
    with tempfile.TemporaryDirectory() as folder, trials.near():
        repo = Path(folder, "repo")
        publish_block_release(repo, 1)
        with process.serving(repo, Path(folder, "data"), "--triton=in-process") as served:
            table = asyncio.run(_watched(served, repo, watchers, connections))
    print(record.format_table(table))


async def _watched(served: process.Served, repo: Path, watchers: int, connections: int) -> Table:
    pid = served.process.pid
    rows: list[Row] = []

    def note(what: str, seconds: float) -> None:
        memory = _status(pid, "VmRSS") / 1024
        rows.append(
            {"": what, "MiB": memory, "threads": _status(pid, "Threads"), "seconds": seconds}
        )

    note("no connection", 0)
    async with _channels(served.address, connections) as channels:
        began = time.monotonic()
        await asyncio.gather(*(_list(channel) for channel in channels))
        note(f"{connections} connections", time.monotonic() - began)
        began = time.monotonic()
        calls: list[Any] = []
        for first in range(0, watchers, _AT_ONCE):
            together = [
                ReleaseServiceStub(channels[number % connections]).WatchReleases(
                    release_pb2.WatchReleasesRequest()
                )
                for number in range(first, min(first + _AT_ONCE, watchers))
            ]
            await asyncio.gather(*(call.read() for call in together))
            calls += together
        note(f"{watchers} watchers", time.monotonic() - began)
        used = processor_seconds(pid)
        await asyncio.sleep(_IDLE_S)
        note(f"processor time of {_IDLE_S:.0f} s", processor_seconds(pid) - used)
        published = asyncio.to_thread(publish_block_release, repo, 2, [1])
        began = time.monotonic()
        await asyncio.gather(published, *(_told(call, 2) for call in calls))
        note("all were told of a release", time.monotonic() - began)
        for call in calls:
            call.cancel()
        await asyncio.sleep(_IDLE_S)
        note("all have left", _IDLE_S)
    return Table("watchers", rows)


@asynccontextmanager
async def _channels(address: str, count: int) -> AsyncIterator[list[grpc.aio.Channel]]:
    own = [("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(address, options=own) for _ in range(count)]
    try:
        yield channels
    finally:
        await asyncio.gather(*(channel.close() for channel in channels))


async def _list(channel: grpc.aio.Channel) -> None:
    await ReleaseServiceStub(channel).ListReleases(release_pb2.ListReleasesRequest())


async def _told(call: Any, releases: int) -> None:
    while len((await call.read()).releases) < releases:
        pass


def _status(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    typer.run(main)
