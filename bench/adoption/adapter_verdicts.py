"""`python -m bench.adoption.adapter_verdicts`: is the verdict `query adapter` right?

It makes twelve pairs of synthetic models, asks `fit --items-gone` for a verdict on each, with and
without `--old-gone`, and measures R@1 of staying, of the adapter and of the map by other queries.
With `--packages`, it does the same with pairs of public models.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.adoption.packaged import draw_operations, write_model_files
from bench.adoption.texts import embed_documents
from bench.commands import run_command
from nobackfill.adopt.maps import load_adapter, load_map
from nobackfill.metrics.bootstrap import paired_bootstrap
from nobackfill.vectors import Vectors, normalise
from tests.adopt.made import write_parquet

NOBACKFILL = Path(sys.executable).with_name("nobackfill")
# Items; those that the new model embeds; queries that the verdict reads; queries of the truth.
ITEMS, SAMPLE, QUERIES, TRUTH = 1500, 400, 250, 2000
# Public models, old and new; texts, and those of them that the new model embeds.
PUBLIC_PAIRS = (("minilm-l3", "minilm-l6"), ("minilm-l6", "minilm-l3"), ("wordllama", "minilm-l6"))
PUBLIC_ITEMS, PUBLIC_SAMPLE = 4000, 2000
# Hidden directions of a pair; a model sees them all, half or a quarter of them.
HIDDEN = 32

Rows = NDArray[np.float64]
# Hidden vectors of items and queries [n, HIDDEN] -> the old and the new model's vectors of both.
Models = Callable[[Rows, Rows, np.random.Generator], tuple[Rows, Rows, Rows, Rows]]


@dataclass(frozen=True)
class _Gallery:
    """A gallery by both models, with queries whose right item is known.

    Attributes:
        old: Items by the old model, float32 [n, a].
        new: Items by the new model, float32 [n, b].
        by_old: Queries by the old model, float32 [q, a].
        by_new: Queries by the new model, float32 [q, b].
        answers: The row of each query's item, int64 [q].
        sample: Rows of the items that the new model embeds for the verdict.
        truth: Number of queries, the first ones, that no verdict reads. The items of the others are
            in `sample`.
    """

    old: Vectors
    new: Vectors
    by_old: Vectors
    by_new: Vectors
    answers: NDArray[np.int64]
    sample: NDArray[np.int64]
    truth: int


def main(
    packages: Annotated[
        Path | None,
        typer.Option(
            help="Folder of packages as `make demo-adopt` or `make converters` fills it; only "
            "read. Without it, only synthetic pairs are judged."
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Folder to which models and vectors are written, and used again.")
    ] = Path("build/adapter-verdicts"),
) -> None:
    """Print one line of JSON for each pair: what was told, R@1 in percent, and the interval of the
    adapter less staying in points.
    """
    galleries = _synthetic() if packages is None else _public(packages, out)
    for name, gallery in galleries:
        with TemporaryDirectory(prefix="nobackfill-verdict-") as folder:
            print(json.dumps({"pair": name} | _judge(gallery, Path(folder))), flush=True)


def _synthetic() -> Iterator[tuple[str, _Gallery]]:
    for name, models in PAIRS.items():
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(ITEMS, HIDDEN)) * np.tile(np.linspace(1.3, 0.7, HIDDEN // 2), 2)
        sample = np.random.default_rng(5).choice(ITEMS, SAMPLE, replace=False)
        answers = np.concatenate([rng.integers(ITEMS, size=TRUTH), sample[:QUERIES]])
        asked = hidden[answers] + 0.5 * rng.normal(size=(len(answers), HIDDEN))
        old, by_old, new, by_new = (
            normalise(some.astype(np.float32)) for some in models(hidden, asked, rng)
        )
        yield name, _Gallery(old, new, by_old, by_new, answers, sample, TRUTH)


def _public(packages: Path, out: Path) -> Iterator[tuple[str, _Gallery]]:
    """Embed descriptions of operations; the operation's name in words is the query."""
    corpus = draw_operations(packages, PUBLIC_ITEMS)
    files = write_model_files(packages, out / "models")
    for old, new in PUBLIC_PAIRS:
        if {old, new} <= set(files):
            sides = [
                embed_documents(corpus.documents, files[name], out / f"{corpus.name}-{name}.npz")
                for name in (old, new)
            ]
            rows = np.arange(PUBLIC_ITEMS)
            # Items of the sample come last, and so do their queries.
            truth = PUBLIC_ITEMS - PUBLIC_SAMPLE
            yield (
                f"{old} to {new}",
                _Gallery(
                    sides[0].bodies, sides[1].bodies, sides[0].titles, sides[1].titles, rows,
                    rows[truth:], truth,
                ),
            )  # fmt: skip


def _judge(gallery: _Gallery, folder: Path) -> dict[str, object]:
    sample, answers = gallery.sample, gallery.answers
    told = np.arange(gallery.truth, len(answers))
    ids = [f"item-{row}" for row in range(len(gallery.old))]
    known = [ids[row] for row in answers[told]]
    write_parquet(folder / "old.parquet", ids, gallery.old)
    write_parquet(folder / "new.parquet", [ids[row] for row in sample], gallery.new[sample])
    write_parquet(folder / "by-old.parquet", known, gallery.by_old[told])
    write_parquet(folder / "by-new.parquet", known, gallery.by_new[told])
    words = ["fit", "--old", "old.parquet", "--new", "new.parquet", "--queries-old"]
    words += ["by-old.parquet", "--queries-new", "by-new.parquet", "--items-gone", "--json"]
    words += ["--adapter", "adapter.npz", "--out", "map.npz"]
    ways = [
        run_command([NOBACKFILL, *words, *more], folder).answer["way"]
        for more in ([], ["--old-gone"])
    ]
    adapt, migrate = load_adapter(folder / "adapter.npz"), load_map(folder / "map.npz")
    # Queries that no verdict has read.
    every = slice(0, gallery.truth)
    by_old, by_new, right = gallery.by_old[every], gallery.by_new[every], answers[every]
    stay = _hits(by_old, gallery.old, right)
    adapted = _hits(adapt(by_new), gallery.old, right)
    gain = paired_bootstrap([adapted], [stay])
    return {
        "told": ways[0],
        "told, old model gone": ways[1],
        "stay": _percent(stay.mean()),
        "adapter": _percent(adapted.mean()),
        "adapter less stay": [_percent(gain.low), _percent(gain.high)],
        "map": _percent(_hits(by_new, migrate(gallery.old), right).mean()),
        "new": _percent(_hits(by_new, gallery.new, right).mean()),
    }


def _hits(queries: Vectors, items: Vectors, answers: NDArray[np.int64]) -> Rows:
    """Return 1 for each query whose nearest item is the right one, and 0 for others."""
    hits: Rows = ((queries @ items.T).argmax(1) == answers).astype(np.float64)
    return hits


def _percent(share: float) -> float:
    return round(100 * float(share), 1)


def _turn(rows: Rows, rng: np.random.Generator) -> Rows:
    """Turn rows by a random rotation, the same for all rows of one call."""
    return np.asarray(rows @ np.linalg.qr(rng.normal(size=(rows.shape[1],) * 2))[0])


def _seen(
    old: slice,
    new: slice,
    *,
    old_noise: float = 0.0,
    noise: float = 0.0,
    shift: float = 0.0,
    bent: bool = False,
) -> Models:
    """Two models that each see some hidden directions; the new space is a rotation.

    Args:
        old: Directions of the old model.
        new: Directions of the new model.
        old_noise: Noise of the old model's queries.
        noise: Noise of the new model's items and queries.
        shift: What is added to each number of the new model.
        bent: The old model bends its numbers by tanh.
    """

    def blur(rows: Rows, deviation: float, rng: np.random.Generator) -> Rows:
        return rows + deviation * rng.normal(size=rows.shape)

    def embed(
        items: Rows, queries: Rows, rng: np.random.Generator
    ) -> tuple[Rows, Rows, Rows, Rows]:
        both = np.concatenate([items, queries])
        by_new = _turn(blur(both[:, new], noise, rng) + shift, rng)
        by_old = np.tanh(_turn(both[:, old], rng)) if bent else both[:, old]
        asked = blur(by_old[len(items) :], old_noise, rng)
        return by_old[: len(items)], asked, by_new[: len(items)], by_new[len(items) :]

    return embed


_FIRST, _SECOND, _MIDDLE = slice(0, 16), slice(16, 32), slice(8, 24)
PAIRS: dict[str, Models] = {
    "rotation": _seen(_FIRST, _FIRST),
    "rotation, the old model reads queries slightly worse": _seen(_FIRST, _FIRST, old_noise=0.25),
    "rotation, the old model reads queries badly": _seen(_FIRST, _FIRST, old_noise=0.8),
    "rotation and shift, the same": _seen(_FIRST, _FIRST, old_noise=0.8, shift=2),
    "rotation and noise, the same": _seen(_FIRST, _FIRST, old_noise=0.6, noise=0.3),
    "bent by tanh, the same": _seen(_FIRST, _FIRST, old_noise=0.5, bent=True),
    "the new model sees more": _seen(slice(0, 8), slice(0, 32)),
    "the new model sees less": _seen(slice(0, 32), slice(0, 8)),
    "half of the directions are shared": _seen(_FIRST, _MIDDLE),
    "half shared, the old model reads queries badly": _seen(_FIRST, _MIDDLE, old_noise=1),
    "disjoint": _seen(_FIRST, _SECOND),
    "disjoint, the old model reads queries badly": _seen(_FIRST, _SECOND, old_noise=1.5),
}


if __name__ == "__main__":
    typer.run(main)
