"""Images from disk to batches: ours beside torchvision's folder and torch's loader, and memory."""

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from bench.harness import Bench, Contender, Row, Table, comparison_table, run_interleaved
from bench.photos import write_photos
from nobackfill.class_folders import list_images
from nobackfill.training.data.pictures import Pictures, ReadingOptions, in_batches, open_pictures

SIZE, BATCH, WORKERS = 224, 128, 2
PHOTO = (375, 500)
SPEED = (
    "Images a second of one pass in shuffled batches of 128, as uint8 at 224 x 224, two reading "
    "processes, which were started before; the same files and the same order of batches for all. "
    "`torchvision` is ImageFolder with Resize((224, 224)) and PILToTensor behind a DataLoader."
)
MEMORY = (
    "Megabytes (proportional set size) of the training's process and its two readers while one "
    "pass goes on, the largest of each fifth, without a cache on disk; decoded, the images are "
    "{decoded:.1f} GiB. Before the pass the process held {before:.0f} MB."
)


def run(bench: Bench) -> list[Table]:
    """Speed at two sizes of file, memory."""
    torch.set_num_threads(1)
    small = bench.folder / "224"
    many = bench.size(400, 10_000, 200_000)
    write_photos(small, many, SIZE, SIZE, min(1000, many // 4))
    photos = bench.folder / "photos"
    few = bench.size(200, 600, 600)
    write_photos(photos, few, *PHOTO, 50)
    return [
        _speed(bench, photos, few, f"JPEGs of {PHOTO[1]} x {PHOTO[0]}"),
        _speed(bench, small, bench.size(200, 2000, 2000), f"JPEGs of {SIZE} x {SIZE}"),
        _memory(small, many),
    ]


def _speed(bench: Bench, folder: Path, count: int, title: str) -> Table:
    """Passes over `count` images, the same of all loaders."""
    listing = list_images(folder)
    rng = np.random.default_rng(0)
    drawn = torch.from_numpy(rng.permutation(len(listing))[:count])

    def pictures(cache: Path | None) -> Pictures:
        opened = open_pictures(listing, SIZE, ReadingOptions(0, WORKERS, cache))
        assert isinstance(opened, Pictures)
        return opened

    plain, cached = pictures(None), pictures(bench.folder / f"cache-{folder.name}")
    theirs = _Torchvision(folder)
    contenders = [
        Contender("torchvision", lambda: _rate(theirs.in_batches(_batches(drawn)), count)),
        Contender("ours", lambda: _rate(in_batches(plain, _batches(drawn)), count)),
        Contender("ours, cached", lambda: _rate(in_batches(cached, _batches(drawn)), count)),
    ]
    # The first pass of each starts its readers, and fills the cache.
    for contender in contenders:
        contender.run()
    measured = run_interleaved(contenders, bench.size(1, 3, 3))
    return comparison_table(
        f"{title}, {count:,} of them", "images/s", measured, "torchvision", SPEED
    )


def _batches(rows: Tensor) -> list[Tensor]:
    return list(torch.split(rows, BATCH))


def _rate(batches: Iterator[Tensor], count: int) -> float:
    started = time.perf_counter()
    seen = sum(len(batch) for batch in batches)
    assert seen == count
    return count / (time.perf_counter() - started)


class _Torchvision:
    """The loader that one would write: persistent workers, uint8 tensors."""

    def __init__(self, folder: Path) -> None:
        transform = v2.Compose([v2.Resize((SIZE, SIZE)), v2.PILToTensor()])
        self._order: list[list[int]] = []
        self._loader = DataLoader(
            ImageFolder(str(folder), transform),
            batch_sampler=_Order(self._order),
            num_workers=WORKERS,
            persistent_workers=True,
        )

    def in_batches(self, batches: list[Tensor]) -> Iterator[Tensor]:
        self._order[:] = [rows.tolist() for rows in batches]
        return (images for images, _ in self._loader)


class _Order:
    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _memory(folder: Path, count: int) -> Table:
    """What the processes hold after each fifth of a pass over all images."""
    gc.collect()
    before = _held_bytes()
    listing = list_images(folder)
    pictures = open_pictures(listing, SIZE, ReadingOptions(0, WORKERS))
    batches = _batches(torch.from_numpy(np.random.default_rng(1).permutation(len(listing))))
    fifths = [round(len(batches) * part / 5) for part in range(1, 6)]
    rows: list[Row] = []
    started, seen, peak = time.perf_counter(), 0, 0
    for number, batch in enumerate(in_batches(pictures, batches), start=1):
        seen += len(batch)
        if number % 50 == 0 or number in fifths:
            peak = max(peak, _held_bytes())
        if number in fifths:
            rate = seen / (time.perf_counter() - started)
            rows.append({"images read": seen, "MB": peak / 2**20, "images/s so far": rate})
            peak = 0
    decoded = count * SIZE * SIZE * 3 / 2**30
    note = MEMORY.format(decoded=decoded, before=before / 2**20)
    return Table(f"Memory over {count:,} images of {SIZE} x {SIZE}", rows, note)


def _held_bytes() -> int:
    """Of this process and all below it: each shared page counted once among its owners."""
    found, waiting = [], [os.getpid()]
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        children = Path(f"/proc/{pid}/task").glob("*/children")
        waiting += [int(child) for file in children for child in file.read_text().split()]
    return sum(_pss(pid) for pid in found)


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
