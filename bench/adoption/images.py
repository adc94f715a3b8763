"""`python -m bench.adoption.images`: the same of real pairs of image models, on class folders."""

import time
from pathlib import Path
from typing import Annotated

import typer

from bench import record
from bench.adoption.pictures import drawn, embedded
from bench.adoption.trial import Trial
from bench.adoption.valley import classes
from bench.harness import Scale, Table

# Old and new: a model of `pictures.embedded`, and its pixels.
PAIRS_OF_MODELS = {
    "Lite0 at 64 px to Lite2": (("lite0", 64), ("lite2", 260)),
    "Lite0 to Lite2": (("lite0", 224), ("lite2", 260)),
}


def main(
    packages: Annotated[Path, typer.Option(help="Where bench/adoption/requirements.txt lies.")],
    pictures: Annotated[Path, typer.Option(help="Folders of PNGs, one a class.")],
    out: Annotated[Path, typer.Option(help="Folder for vectors; what is there is kept.")],
    items: Annotated[int, typer.Option(min=100, help="Pictures.")] = 4500,
    pairs: Annotated[int, typer.Option(min=50, help="Of them, those that are fitted on.")] = 2000,
    queries: Annotated[
        int, typer.Option(min=20, help="Pictures that a second view asks for.")
    ] = 1000,
    all_pairs: Annotated[bool, typer.Option(help="Also models of the same quality.")] = True,
) -> None:
    """Measure verdicts, maps and valleys on pictures, and keep the tables."""
    started = time.perf_counter()
    some = drawn(pictures, items)
    asked = [*range(queries), *range(pairs, pairs + queries)]
    trials: list[Trial] = []
    for name, models in PAIRS_OF_MODELS.items():
        if not all_pairs and trials:
            break
        old, new = (
            embedded(some, asked, packages, model, size, out / f"{model}-{size}-{items}.npz")
            for model, size in models
        )
        trials.append(Trial(name, old, new, pairs, queries))
    counts = (*(count for count in (100, 500) if count < pairs), pairs)
    tables = [
        Table("The verdict and the truth", [row for one in trials for row in one.verdict()]),
        Table("Classes on the way", [row for one in trials for row in classes(one, some.labels)]),
        Table("A second view on the way", [row for one in trials for row in one.healing()]),
        Table("Maps alone, R@1", [row for one in trials for row in one.maps(counts)]),
    ]
    path = record.result_path("adoption-images", Scale.SMALL)
    record.save(path, "adoption-images", Scale.SMALL, time.perf_counter() - started, tables)
    print("\n".join(map(record.markdown, tables)))


if __name__ == "__main__":
    typer.run(main)
