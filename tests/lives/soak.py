"""Swaps under load for a long time: `make soak MINUTES=20 SWAPS=50`. Nothing may grow.

A gateway with its real Triton serves one gallery that has a graph, to clients that search without a
pause and one that replaces and deletes items. Every few seconds memory, file descriptors and shared
memory of the gateway and of each process below it are written down; a line is fitted through what
came after the warm-up.
"""

import argparse
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from demo.load import SEARCH, Load, Run
from nobackfill.v1 import release_pb2
from tests.server.process import Served, serving, triton_venv
from tests.server.support import SEARCHED, Client, images, mixed_searches
from tests.support.blocks import manifest, png, publish_block_release
from tests.support.processes import children

# A gallery of more items than this is searched by a graph.
EXTRA = 2_500
EVERY_S = 5.0
# Of the time, before growth counts: caches fill, allocators take what they keep.
WARM_UP = 0.3
# Bounds: above what 9 minutes showed, 0.06 of Triton and 0.32 of the gateway, see the docs.
MEGABYTES_A_MINUTE = 1.0
DESCRIPTORS = 3
SHARED_MEGABYTES = 0.0


@dataclass
class Watch:
    """Samples by program, all its processes together: (minute, resident bytes, open descriptors);
    and bytes of the files in /dev/shm that any of them has mapped."""

    programs: dict[str, list[tuple[float, int, int]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    shared: list[tuple[float, int]] = field(default_factory=list)

    def look(self, minute: float, served: Served) -> None:
        """One sample of everything."""
        resident, descriptors, shared = Counter[str](), Counter[str](), set[Path]()
        for pid in [served.process.pid, *sorted(children(served.process.pid))]:
            process = Path(f"/proc/{pid}")
            try:
                name = (process / "comm").read_text().strip()
                pages = int((process / "statm").read_text().split()[1])
                files = len(list((process / "fd").iterdir()))
                maps = (process / "maps").read_text().splitlines()
            except OSError:
                # Gone since it was listed: the ONNX check's, say, which lives for a second.
                continue
            resident[name] += pages * 4096
            descriptors[name] += files
            mapped = [line[line.index("/") :] for line in maps if "/dev/shm/" in line]
            shared.update(map(Path, mapped))
        for name, total in resident.items():
            self.programs[name].append((minute, total, descriptors[name]))
        self.shared.append((minute, sum(f.stat().st_size for f in shared if f.exists())))


@dataclass(frozen=True)
class Growth:
    """Of one figure, after the warm-up: the median of each fifth, and the fitted line's slope a
    minute."""

    fifths: tuple[float, ...]
    slope: float

    @property
    def total(self) -> float:
        """From the first fifth to the last."""
        return self.fifths[-1] - self.fifths[0]

    @classmethod
    def of(cls, samples: list[tuple[float, float]]) -> "Growth":
        """Of (minute, value), at least five of them after the warm-up."""
        minutes, values = np.array(samples).T
        late = minutes >= minutes[0] + WARM_UP * (minutes[-1] - minutes[0])
        parts = np.array_split(values[late], 5)
        slope = np.polyfit(minutes[late], values[late], 1)[0]
        return cls(tuple(float(np.median(part)) for part in parts), float(slope))


def soak(top: Path, minutes: float, swaps: int) -> tuple[Watch, Run]:
    """Serve, load, swap; what was seen."""
    repo, watch = top / "repo", Watch()
    publish_block_release(repo, 1)
    venv = triton_venv()
    options = [f"--triton-venv={venv}"] if venv else ["--triton=in-process"]
    with serving(repo, top / "data", *options) as served, Client(served.address) as client:
        client.create_gallery("g")
        for first in range(0, SEARCHED + EXTRA, 100):
            client.put_images(images(SEARCHED + EXTRA)[first : first + 100], first=first)
        publish_block_release(repo, 2, [1])
        ended = threading.Event()
        writer = threading.Thread(target=_write, args=(served.address, ended))
        began = time.monotonic()
        searches = mixed_searches(top / "searches", manifest(repo, 1), manifest(repo, 2))
        with Load() as load:
            load.begin(served.address, SEARCH, searches, 2, judged=True)
            writer.start()
            due = [began + 60 * minutes * (i + 0.5) / swaps for i in range(swaps)]
            for number, (moment, _) in enumerate(pairwise([*due, 0.0])):
                _look_until(watch, served, began, moment)
                _swap(client, number)
            _look_until(watch, served, began, began + 60 * minutes)
            met = load.end()
        ended.set()
        writer.join()
    return watch, met


def _look_until(watch: Watch, served: Served, began: float, moment: float) -> None:
    while (now := time.monotonic()) < moment:
        watch.look((now - began) / 60, served)
        time.sleep(min(EVERY_S, max(0.0, moment - time.monotonic())))


def _swap(client: Client, number: int) -> None:
    """Activations of release 2 and rollbacks in turn."""
    if number % 2:
        assert client.rollback(confirm=True).done
        return
    event = client.swap(2, ("cutover", "dual")[number // 2 % 2])
    assert event.phase == release_pb2.PHASE_DONE, f"{event}"


def _write(address: str, ended: threading.Event) -> None:
    """Replace and delete items that no query asks for, so that every swap has some to carry."""
    rng = np.random.default_rng(0)
    pictures = [png(picture) for picture in images(200, seed=7)]
    with Client(address) as client:
        while not ended.wait(0.2):
            names = [f"i{SEARCHED + int(n)}" for n in rng.integers(EXTRA, size=4)]
            client.put("g", {name: pictures[int(rng.integers(200))] for name in names[:3]})
            client.delete("g", names[3:])


def tell(watch: Watch, met: Run) -> list[str]:
    """Print what was seen; what is beyond its bound."""
    failures = Counter(met.failures)
    wrong = [f"{count} times {what}" for what, count in failures.most_common(5)]
    print(f"{len(met.latencies):,} answers, {len(met.failures)} failed or wrong, "
          f"by release {dict(sorted(Counter(met.releases).items()))}")  # fmt: skip
    print(f"{'program':20} {'MiB, a fifth of the time each':34} {'a minute':>8}  files")
    longest = max(map(len, watch.programs.values()))
    for name, samples in watch.programs.items():
        if len(samples) < longest / 2:
            continue
        memory = Growth.of([(minute, resident / 2**20) for minute, resident, _ in samples])
        files = Growth.of([(minute, count) for minute, _, count in samples])
        print(f"{name:20} {_row(memory)} {memory.slope:8.2f}  "
              f"{files.fifths[0]:.0f} to {files.fifths[-1]:.0f}")  # fmt: skip
        if memory.slope > MEGABYTES_A_MINUTE:
            wrong.append(f"{name} grows by {memory.slope:.2f} MiB a minute")
        if files.total > DESCRIPTORS:
            wrong.append(f"{name} has {files.total:.0f} more files open")
    shared = Growth.of([(minute, size / 2**20) for minute, size in watch.shared])
    print(f"{'shared memory':20} {_row(shared)} {shared.slope:8.2f}")
    if shared.total > SHARED_MEGABYTES:
        wrong.append(f"shared memory grows by {shared.total:.1f} MiB")
    return wrong


def _row(growth: Growth) -> str:
    return " ".join(f"{value:6.1f}" for value in growth.fifths)


def main() -> None:
    """Soak as long as asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--swaps", type=int, default=50)
    asked = parser.parse_args()
    # Not in memory: that is what is watched.
    top = Path(tempfile.mkdtemp(prefix="nobackfill-soak-"))
    try:
        wrong = tell(*soak(top, asked.minutes, asked.swaps))
    finally:
        shutil.rmtree(top)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
