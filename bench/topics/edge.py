"""The device: add, search and sync as whole commands, against their bare parts."""

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from PIL import Image

from bench import bare, data
from bench.commands import CommandResult, gallery_mib, run_edge_client
from bench.galleries import put_items
from bench.harness import Bench, Contender, Measurement, Row, Table, run_interleaved
from bench.published import INNER, SIZE, Publication, make_publication
from nobackfill.gallery.sqlite_gallery import SqliteGallery

THREADS = 2
ADDED = (
    "`add` of PNG files of 32 x 32 pixels, once each; the embedder costs next to nothing. `bare "
    "sum` decodes, runs both encoders, inserts the vectors in one transaction, and nothing else."
)
SEARCHED = (
    "`search IMAGE`, a whole command from process start; exact. `bare sum` decodes, runs the "
    "embedder, reads all vectors and takes the nearest 10, in a process that has started."
)
SYNCED = (
    "`sync` from release 1 to 2, FCT's transform, 2 threads: `command` is the whole process with "
    "its downloads, checks and probes; `upgrade` what it says of its staged upgrade and flip; "
    "`bare sum` reads all rows, runs onnxruntime on the same batches, writes all rows, and nothing "
    "else."
)


def run(bench: Bench) -> list[Table]:
    """Add, search, sync by size."""
    pair = make_publication(bench.shared, inner=bench.size(64, INNER, INNER))
    small, full = (1000, 10_000, 100_000), (1000, 10_000, 100_000, 1_000_000)
    sizes: tuple[int, ...] = bench.size((200,), small, full)
    # Making 100,000 files and adding them takes minutes.
    most = bench.size(200, 10_000, 100_000)
    added = [_add(bench, pair, size) for size in sizes if size <= most]
    devices = {size: make_filled_device(bench, pair, size) for size in sizes}
    tables = [_search(bench, pair, devices), _sync(bench, pair, devices)]
    return [Table("add", added, ADDED), *tables]


def make_device(folder: Path, pair: Publication) -> tuple[Path, Path]:
    """An empty gallery in release 1's space, and the publication that it follows."""
    folder.mkdir(parents=True)
    repo = pair.copy_first(folder / "publication")
    gallery = folder / "gallery.sqlite"
    run_edge_client(gallery, "init", "--from", repo, "--root", repo / "1.root.json")
    return gallery, repo


def _images(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(data.draw_images(count, SIZE)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def _add(bench: Bench, pair: Publication, size: int) -> Row:
    folder = bench.folder / f"add-{size}"
    gallery, _ = make_device(folder, pair)
    images = _images(folder / "images", size)
    least = bare.time_adding(pair, images, folder / "bare.sqlite", THREADS)
    done = run_edge_client(gallery, "add", images)
    assert len(done.answer["added"]) == size
    return {
        "items": size,
        "seconds": done.seconds,
        "bare sum s": least,
        "of bare sum": done.seconds / least,
        "items/s": size / done.seconds,
        "peak MiB": round(done.mib),
        "disk MiB": gallery_mib(gallery),
    }


def make_filled_device(bench: Bench, pair: Publication, size: int) -> Path:
    """The folder of a device with so many items, its publication two releases long.

    It is filled once for all topics.
    """
    folder = bench.shared / f"device-{pair.folder.name}-{size}"
    if not (folder / "done").exists():
        shutil.rmtree(folder, ignore_errors=True)
        gallery, repo = make_device(folder, pair)
        with SqliteGallery.open(gallery) as store:
            put_items(store, pair.manifests[1].space, data.draw_items(size))
        pair.publish_second(repo)
        (folder / "done").touch()
    return folder


def _search(bench: Bench, pair: Publication, devices: dict[int, Path]) -> Table:
    query = bench.folder / "query.png"
    Image.fromarray(data.draw_images(1, SIZE, seed=7)[0]).save(query)
    rows: list[Row] = []
    rounds: dict[str, Sequence[float]] = {}
    for size, folder in devices.items():
        gallery = folder / "gallery.sqlite"
        done: list[CommandResult] = []
        contenders = [
            Contender("search", partial(_searched, gallery, query, done)),
            Contender("bare", partial(bare.time_search, pair, query, gallery, THREADS)),
        ]
        measured = run_interleaved(contenders, bench.size(1, 3, 5))
        search = measured["search"]
        rounds |= {f"{size} items, {name}": one.rounds for name, one in measured.items()}
        rows.append(
            {
                "items": size,
                "seconds": search.median,
                "spread": search.spread_text,
                "bare sum s": measured["bare"].median,
                "of bare sum": search.ratio(measured["bare"]),
                "peak MiB": round(max(one.mib for one in done)),
            }
        )
    return Table("search", rows, SEARCHED, rounds)


def _searched(gallery: Path, query: Path, done: list[CommandResult]) -> float:
    return _seconds(run_edge_client(gallery, "search", query), done)


def _sync(bench: Bench, pair: Publication, devices: dict[int, Path]) -> Table:
    rows: list[Row] = []
    rounds: dict[str, Sequence[float]] = {}
    for size, folder in devices.items():
        for kind in ("fp32", "int8"):
            measured, cost = _synced(bench, pair, folder, kind, size)
            rounds |= {f"{size} items, {kind}, {name}": m.rounds for name, m in measured.items()}
            command, upgrade, least = (measured[n] for n in ("command", "upgrade", "bare"))
            rows.append(
                {
                    "items": size,
                    "kind": kind,
                    "command s": command.median,
                    "upgrade s": upgrade.median,
                    "bare sum s": least.median,
                    "upgrade of bare": upgrade.ratio(least),
                    "command of bare": command.ratio(least),
                    "items/s": size / command.median,
                    **cost,
                }
            )
    return Table("sync", rows, SYNCED, rounds)


def _synced(
    bench: Bench, pair: Publication, folder: Path, kind: str, size: int
) -> tuple[dict[str, Measurement], Row]:
    """One size and kind: seconds of the command, of its upgrade and of the bare parts; memory and
    disk."""
    done: list[CommandResult] = []
    disk: list[float] = []

    def command() -> float:
        took = _seconds(sync_copy(folder, kind), done)
        disk.append(gallery_mib(folder / "copy" / "gallery.sqlite"))
        return took

    contenders = [
        Contender("command", command),
        Contender("bare", partial(_bare, folder, pair, kind)),
    ]
    rounds = bench.size(1, 2, 3) if size < 1_000_000 else 1
    measured = run_interleaved(contenders, rounds, warm=False)
    measured["upgrade"] = Measurement(tuple(one.answer["upgrade_seconds"] for one in done))
    return measured, {"peak MiB": round(max(one.mib for one in done)), "disk MiB": max(disk)}


def _seconds(one: CommandResult, done: list[CommandResult]) -> float:
    done.append(one)
    return one.seconds


def copy_device(folder: Path) -> Path:
    """A fresh copy of the device; its publication is shared, by the path that it remembers."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in folder.glob("gallery.sqlite*"):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy / path.name)
    return copy / "gallery.sqlite"


def sync_copy(folder: Path, kind: str) -> CommandResult:
    """`sync` of a fresh copy of the device."""
    done = run_edge_client(copy_device(folder), "sync", f"--{kind}")
    assert done.answer["state"] == "upgraded", done.answer
    return done


def _bare(folder: Path, pair: Publication, kind: str) -> float:
    with SqliteGallery.open(copy_device(folder)) as store:
        return bare.time_upgrade(store, pair, kind, THREADS).total
