"""`python -m bench.adoption.scanning`: seconds and memory of a verdict on a whole large gallery.

It writes a folder of numpy files with synthetic vectors, block by block, and runs the commands on
it as a user does: `inspect`, `sample` and `fit`, each a process of its own.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.commands import run_command
from nobackfill.durable import append_bytes
from nobackfill.vectors import Vectors, normalise

NOBACKFILL = Path(sys.executable).with_name("nobackfill")
# Rows of one block, which has a seed of its own, so that any block can be made again.
BLOCK = 100_000
HIDDEN = 32


def main(
    rows: Annotated[int, typer.Option(help="Items of the gallery.")] = 1_000_000,
    dim: Annotated[int, typer.Option(help="Dimension of the old vectors.")] = 64,
    pairs: Annotated[int, typer.Option(help="Items that the new model embeds.")] = 2000,
    queries: Annotated[int, typer.Option(help="Queries whose right item is known.")] = 1000,
    folder: Annotated[
        Path | None, typer.Option(help="Folder for a temporary folder; None: that of the system.")
    ] = None,
) -> None:
    """Print one line of JSON for each command: its seconds, and the most MiB that it held."""
    with TemporaryDirectory(prefix="nobackfill-scan-", dir=folder) as place:
        gallery, new = Path(place, "gallery"), Path(place, "new")
        _write_gallery(gallery, rows, dim)
        done = run_command([NOBACKFILL, "inspect", gallery, "--json"], Path(place))
        _tell("inspect", rows, dim, done.seconds, done.mib)
        # `sample` prints ids; its answer is a file.
        ids = Path(place, "sample.txt")
        shell: list[str | Path] = [
            "sh", "-c", '"$0" sample "$1" -n "$2" --out "$3" >/dev/null && echo "{}"',
            NOBACKFILL, gallery, str(pairs), ids,
        ]  # fmt: skip
        done = run_command(shell, Path(place))
        _tell("sample", rows, dim, done.seconds, done.mib)
        _write_sample(Path(place), new, np.array(ids.read_text().split(), np.int64), dim, queries)
        words: list[str | Path] = ["fit", "--old", gallery, "--new", new]
        words += ["--queries-old", Path(place, "by-old"), "--queries-new", Path(place, "by-new")]
        done = run_command([NOBACKFILL, *words, "--json"], Path(place))
        _tell("fit", rows, dim, done.seconds, done.mib)


def _tell(name: str, rows: int, dim: int, seconds: float, mib: float) -> None:
    line = {"command": name, "rows": rows, "dim": dim, "seconds": round(seconds, 1)}
    print(json.dumps(line | {"MiB": round(mib)}), flush=True)


def _hidden(block: int) -> NDArray[np.float32]:
    """Return the hidden vectors of the items of a block, [BLOCK, HIDDEN]."""
    return np.random.default_rng(block).standard_normal((BLOCK, HIDDEN), np.float32)


def _embed(hidden: NDArray[np.float32], dim: int, model: int, noise: float, seed: int) -> Vectors:
    """Vectors [n, dim] of a model: it sees some of what items are better than the rest."""
    weights = np.linspace(0.3, 1.5, HIDDEN)[:: (1, -1)[model]]
    turn = np.random.default_rng(900 + model).standard_normal((HIDDEN, dim)) * weights[:, None]
    vectors = hidden @ turn.astype(np.float32)
    rng = np.random.default_rng([seed, model])
    vectors += noise * np.sqrt(HIDDEN) * rng.standard_normal(vectors.shape, np.float32)
    return normalise(vectors)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    for block in range(-(-rows // BLOCK)):
        yield block, min(BLOCK, rows - block * BLOCK)


def _write_gallery(folder: Path, rows: int, dim: int) -> None:
    folder.mkdir()
    np.save(folder / "ids.npy", np.arange(rows))
    path = folder / "old.npy"
    with path.open("wb") as file:
        form = {"descr": "<f2", "fortran_order": False, "shape": (rows, dim)}
        np.lib.format.write_array_header_1_0(file, form)
    for block, size in _blocks(rows):
        vectors = _embed(_hidden(block)[:size], dim, 0, 0.5, block)
        append_bytes(path, vectors.astype("<f2").tobytes())


def _write_sample(place: Path, new: Path, ids: NDArray[np.int64], dim: int, queries: int) -> None:
    """Write the new vectors of the sampled items, and queries for some of them by both models."""
    hidden = np.concatenate(
        [_hidden(block)[ids[ids // BLOCK == block] % BLOCK] for block in np.unique(ids // BLOCK)]
    )
    _write(new, ids, _embed(hidden, dim, 1, 0.2, 1_000_000))
    some = np.random.default_rng(1).permutation(len(ids))[:queries]
    rng = np.random.default_rng(2)
    looks = hidden[some] + 0.7 * rng.standard_normal((len(some), HIDDEN), np.float32)
    for model, name in enumerate(("by-old", "by-new")):
        _write(place / name, ids[some], _embed(looks, dim, model, 0.2, 2_000_000))


def _write(folder: Path, ids: NDArray[np.int64], vectors: Vectors) -> None:
    folder.mkdir()
    np.save(folder / "ids.npy", ids)
    np.save(folder / "vectors.npy", vectors)


if __name__ == "__main__":
    typer.run(main)
