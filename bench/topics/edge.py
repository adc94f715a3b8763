"""The device: add, search and sync as whole commands, against the bare parts of an upgrade."""

import shutil
from functools import partial
from pathlib import Path

from PIL import Image

from bench import bare, data
from bench.commands import Done, edge, size_mib
from bench.galleries import put
from bench.harness import Bench, Contender, Measured, Row, Table, interleave
from bench.models import INNER
from bench.published import SIZE, Publication, publication
from gallery.store import Store

THREADS = 2
ADDED = "`add` of PNG files of 32 x 32 pixels; the embedder costs next to nothing."
SEARCHED = "`search IMAGE`, a whole command from process start; exact."
SYNCED = (
    "`sync` from release 1 to 2, FCT's transform, 2 threads: `command` is the whole process with "
    "its downloads, checks and probes; `upgrade` what it says of its staged upgrade and flip; "
    "`bare sum` reads all rows, runs onnxruntime on the same batches, writes all rows, and nothing "
    "else."
)


def run(bench: Bench) -> list[Table]:
    """Add, search, sync by size."""
    pair = publication(bench.shared, inner=bench.size(64, INNER, INNER))
    sizes = [bench.size(200, 1000, 1000)]
    if not bench.tiny:
        sizes += [10_000, 100_000]
    if bench.full:
        sizes.append(1_000_000)
    added = [_add(bench, pair, size) for size in sizes if size <= 10_000]
    devices = {size: filled(bench.folder / f"filled-{size}", pair, size) for size in sizes}
    searched = [_search(bench, devices[size], size) for size in sizes]
    synced = [row for size in sizes for row in _sync(bench, pair, devices[size], size)]
    return [
        Table("add", added, ADDED),
        Table("search", searched, SEARCHED),
        Table("sync", synced, SYNCED),
    ]


def device(folder: Path, pair: Publication) -> tuple[Path, Path]:
    """An empty gallery in release 1's space, and the publication that it follows."""
    folder.mkdir(parents=True)
    repo = pair.copy_first(folder / "publication")
    gallery = folder / "gallery.sqlite"
    edge(gallery, "init", "--from", repo, "--root", repo / "1.root.json")
    return gallery, repo


def _images(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(data.images(count, SIZE)):
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def _add(bench: Bench, pair: Publication, size: int) -> Row:
    folder = bench.folder / f"add-{size}"
    gallery, _ = device(folder, pair)
    done = edge(gallery, "add", _images(folder / "images", size))
    assert len(done.answer["added"]) == size
    return {
        "items": size,
        "seconds": done.seconds,
        "items/s": size / done.seconds,
        "peak MiB": round(done.mib),
        "disk MiB": size_mib(gallery),
    }


def filled(folder: Path, pair: Publication, size: int) -> Path:
    """The folder of a device with so many items, its publication two releases long."""
    gallery, repo = device(folder, pair)
    with Store.open(gallery) as store:
        put(store, pair.manifests[1].space, data.things(size))
    pair.publish_second(repo)
    return folder


def _search(bench: Bench, folder: Path, size: int) -> Row:
    query = folder / "query.png"
    Image.fromarray(data.images(1, SIZE, seed=7)[0]).save(query)
    done: list[Done] = []

    def once() -> float:
        done.append(edge(folder / "gallery.sqlite", "search", query))
        return done[-1].seconds

    measured = interleave([Contender("search", once)], bench.size(1, 3, 5))["search"]
    return {
        "items": size,
        "seconds": measured.median,
        "spread": f"±{100 * measured.spread:.0f} %",
        "peak MiB": round(max(one.mib for one in done)),
    }


def _sync(bench: Bench, pair: Publication, folder: Path, size: int) -> list[Row]:
    rows: list[Row] = []
    for kind in ("fp32", "int8"):
        done: list[Done] = []
        contenders = [
            Contender("command", partial(_command, folder, kind, done)),
            Contender("bare", partial(_bare, folder, pair, kind)),
        ]
        rounds = bench.size(1, 2, 3) if size < 1_000_000 else 1
        measured = interleave(contenders, rounds, warm=False)
        upgrade = Measured(tuple(one.answer["upgrade_seconds"] for one in done))
        rows.append(
            {
                "items": size,
                "kind": kind,
                "command s": measured["command"].median,
                "upgrade s": upgrade.median,
                "bare sum s": measured["bare"].median,
                "upgrade of bare": upgrade.ratio(measured["bare"]),
                "command of bare": measured["command"].ratio(measured["bare"]),
                "items/s": size / measured["command"].median,
                "peak MiB": round(max(one.mib for one in done)),
                "disk MiB": size_mib(folder / "copy" / "gallery.sqlite"),
            }
        )
    return rows


def copied(folder: Path) -> Path:
    """A fresh copy of the device; its publication is shared, by the path that it remembers."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir()
    for path in folder.glob("gallery.sqlite*"):
        (shutil.copytree if path.is_dir() else shutil.copyfile)(path, copy / path.name)
    return copy / "gallery.sqlite"


def synced(folder: Path, kind: str) -> Done:
    """`sync` of a fresh copy of the device."""
    done = edge(copied(folder), "sync", f"--{kind}")
    assert done.answer["state"] == "upgraded", done.answer
    return done


def _command(folder: Path, kind: str, done: list[Done]) -> float:
    done.append(synced(folder, kind))
    return done[-1].seconds


def _bare(folder: Path, pair: Publication, kind: str) -> float:
    with Store.open(copied(folder)) as store:
        return bare.upgrade_seconds(store, pair, kind, THREADS)
