"""`python -m bench.adoption.images`: the same of real pairs of image models, on class folders."""

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench import record
from bench.adoption.pictures import drawn, embedded
from bench.adoption.trial import Trial
from bench.adoption.valley import classes
from bench.harness import Scale, Table

Rows = NDArray[np.int64]
# Old and new: a model of `pictures.embedded`, and its pixels; and whether pairs are of the first
# half of the classes alone, and everything else of the other half.
PAIRS_OF_MODELS = {
    "Lite0 at 64 px to Lite2": (("lite0", 64), ("lite2", 260), False),
    "the same, of other classes": (("lite0", 64), ("lite2", 260), True),
    "Lite0 to Lite2": (("lite0", 224), ("lite2", 260), False),
}
NOTE = (
    "A query is a second view of a picture. The verdict is fitted and judged on {pairs} pictures "
    "of which {queries} have one; the truth is that of the others, in %. `best` as in the texts' "
    "table."
)


def main(
    packages: Annotated[
        Path, typer.Option(help="Where demo/adoption/requirements-images.txt lies.")
    ],
    pictures: Annotated[Path, typer.Option(help="Folders of PNGs, one a class.")],
    out: Annotated[Path, typer.Option(help="Folder for vectors; what is there is kept.")],
    items: Annotated[int, typer.Option(min=100, help="Pictures.")] = 4000,
    pairs: Annotated[int, typer.Option(min=50, help="Of them, those that are fitted on.")] = 2000,
    queries: Annotated[
        int, typer.Option(min=20, help="Pictures that a second view asks for.")
    ] = 500,
) -> None:
    """Measure verdicts, maps and valleys on pictures, and keep the tables."""
    started = time.perf_counter()
    some = drawn(pictures, items)
    names = np.unique(some.labels)
    first = np.isin(some.labels, names[: len(names) // 2])
    by_class = np.argsort(~first, kind="stable")
    orders = {False: (np.arange(items), pairs), True: (by_class, min(pairs, int(first.sum())))}
    asked = np.unique(np.concatenate([_asked(*one, queries) for one in orders.values()]))
    trials: list[tuple[Trial, NDArray[np.str_]]] = []
    for name, (*models, apart) in PAIRS_OF_MODELS.items():
        order, fitted = orders[apart]
        old, new = (
            embedded(some, asked, packages, model, size, out / f"{model}-{size}-{items}.npz")
            for model, size in models
        )
        trial = Trial(name, old.part(order), new.part(order), fitted, queries)
        trials.append((trial, some.labels[order]))
    verdicts = [row for one, _ in trials for row in one.verdict()]
    maps = [row for one, _ in trials for row in one.maps(_counts(one.pairs))]
    tables = [
        Table("The verdict and the truth", verdicts, NOTE.format(pairs=pairs, queries=queries)),
        Table("Classes on the way", [row for one in trials for row in classes(*one)]),
        Table("A second view on the way", [row for one, _ in trials for row in one.healing()]),
        Table("Maps alone, R@1", maps),
    ]
    path = record.result_path("adoption-images", Scale.SMALL)
    record.save(path, "adoption-images", Scale.SMALL, time.perf_counter() - started, tables)
    print("\n".join(map(record.markdown, tables)))


def _counts(pairs: int) -> tuple[int, ...]:
    return (*(count for count in (100, 500) if count < pairs), pairs)


def _asked(order: Rows, pairs: int, queries: int) -> Rows:
    """Rows that a trial of this order has queries of."""
    return np.concatenate([order[:queries], order[pairs : pairs + queries]])


if __name__ == "__main__":
    typer.run(main)
