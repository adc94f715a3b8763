"""`python -m bench.adoption.images`: the same of real pairs of image models, on class folders."""

from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from bench.adoption.beside import NOTE as BESIDE
from bench.adoption.beside import compare_rivals
from bench.adoption.curves import AGAINST_OLD, AGAINST_OLD_TITLE
from bench.adoption.curves import NOTE as CURVES
from bench.adoption.maps_alone import NOTE as MAPS_ALONE
from bench.adoption.maps_alone import maps_alone
from bench.adoption.parts import Part, run_parts
from bench.adoption.pictures import draw_pictures, embed_pictures
from bench.adoption.trial import Trial
from bench.adoption.valley import class_valley_rows
from nobackfill.adopt.pairs import Pairs

Rows = NDArray[np.int64]
NONE: Rows = np.empty(0, np.int64)
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
    "table. Class figures are of each of the others asking for its class, itself left out; the "
    "verdict knows of none."
)
# Rivals of 1,280 dims take two minutes a draw.
DRAWS = 1
# Pictures that maps of many pairs are fitted on as well, as far as there are so many.
MORE = 3000


def main(
    packages: Annotated[
        Path,
        typer.Option(
            help="Folder in which the packages of demo/adoption/requirements-images.txt are "
            "installed; only read."
        ),
    ],
    pictures: Annotated[
        Path,
        typer.Option(help="Folder of PNG files, one folder in it for each class; only read."),
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which vectors are written; those in it are used again.")
    ],
    items: Annotated[int, typer.Option(min=100, help="Number of pictures to measure on.")] = 4000,
    pairs: Annotated[
        int, typer.Option(min=50, help="Number of these pictures on which maps are fitted.")
    ] = 2000,
    queries: Annotated[
        int,
        typer.Option(
            min=20,
            help="Number of pictures that are searched for by a changed copy: cropped, mirrored "
            "or not, and lighter or darker.",
        ),
    ] = 500,
    only: Annotated[
        str,
        typer.Option(
            help="Measure only pairs of models whose name contains this text; empty: every pair."
        ),
    ] = "",
) -> None:
    """Measure verdicts, maps, rivals and valleys on pictures, and keep the tables."""
    some = draw_pictures(pictures, items)
    names = np.unique(some.labels)
    first = np.isin(some.labels, names[: len(names) // 2])
    near, far = np.flatnonzero(first)[:pairs], np.flatnonzero(~first)
    orders = {False: (np.arange(items), pairs), True: (np.concatenate([near, far]), len(near))}
    asked = np.unique(np.concatenate([_asked(*one, queries) for one in orders.values()]))
    others = draw_pictures(
        pictures, min(MORE, len(list(pictures.glob("*/*.png"))) - items), after=items
    )
    near_others = np.isin(others.labels, names[: len(names) // 2])
    trials = []
    for name, (*models, apart) in PAIRS_OF_MODELS.items():
        order, fitted = orders[apart]
        old, new = (
            embed_pictures(some, asked, packages, model, size, out / f"{model}-{size}-{items}.npz")
            for model, size in models
        )
        more = [
            embed_pictures(
                others, NONE, packages, model, size, out / f"{model}-{size}-{items}-more.npz"
            )
            .part(np.flatnonzero(near_others | (not apart)))
            .bodies
            for model, size in models
        ]
        labels = some.labels[order]
        both = old.part(order), new.part(order)
        trials.append(Trial(name, *both, fitted, queries, labels, Pairs([], more[0], more[1])))
    parts: list[Part] = []
    for one in trials:
        parts.append(Part("The verdict and the truth", one.name, one.verdict_rows))
        parts.append(Part("Classes on the way", one.name, partial(class_valley_rows, one)))
        parts.append(Part("A second view on the way", one.name, one.reembedding_rows))
        parts.append(Part(AGAINST_OLD_TITLE, one.name, one.rows_against_old))
    parts += [Part("Maps alone", one.name, partial(maps_alone, one)) for one in trials]
    parts += [
        Part("Beside rivals", one.name, partial(compare_rivals, one, count, DRAWS))
        for count in (pairs, pairs // 4)
        for one in trials
    ]
    notes = {
        "The verdict and the truth": NOTE.format(pairs=pairs, queries=queries),
        "Classes on the way": CURVES,
        "A second view on the way": CURVES,
        AGAINST_OLD_TITLE: AGAINST_OLD,
        "Beside rivals": BESIDE,
        "Maps alone": MAPS_ALONE,
    }
    run_parts("adoption-images", parts, notes, only)


def _asked(order: Rows, pairs: int, queries: int) -> Rows:
    """Rows that a trial of this order has queries of."""
    return np.concatenate([order[:queries], order[pairs : pairs + queries]])


if __name__ == "__main__":
    typer.run(main)
