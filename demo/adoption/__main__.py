"""From `nobackfill inspect` to a flipped column, with real models and a real PostgreSQL."""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from demo import database
from demo.adoption import pictures
from demo.adoption.figures import Lists, compute_figures, print_figures
from demo.adoption.shop import Shop, read_vectors_by_id
from demo.adoption.wares import Pictures, Texts, Wares
from demo.children import Children
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.sources import open_searchable
from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.serve import Dual, NativeVectorFile, ReembeddingLimits

# Hits of a query that are compared.
HITS = 10
# What a query waits for items that are embedded again; here until all are.
PATIENCE = 60.0


class Adoption:
    """The steps, in order. `folder` keeps models and vectors: a killed run goes on there."""

    def __init__(self, folder: Path, wares: Wares, children: Children) -> None:
        self._folder, self._wares, self._children = folder, wares, children
        self._begun = time.monotonic()

    def run(self, sampled: int) -> None:
        wares, (old, new) = self._wares, self._wares.models
        self._embed("old-vectors", wares.items, old)
        asked_old = self._embed("queries-old", wares.queries, old)
        asked_new = self._embed("queries-new", wares.queries, new)
        shop = Shop(database.start_database(self._children, self._folder / "postgresql"))
        shop.refill(wares.rows, self._folder / "old-vectors")
        self._command("inspect", shop.source)
        ids = self._folder / "sample.txt"
        self._command("sample", shop.source, "-n", sampled, "--out", ids)
        made = self._embed("new-vectors", wares.items_of_ids(shop.source, ids), new)
        self._command(
            "fit", "--old", shop.source, "--new", made,
            "--queries-old", asked_old, "--queries-new", asked_new, "--out", self._map,
            "--joining", self._joining, "--report", self._folder / "verdict.html",
        )  # fmt: skip
        said = self._command("carry", shop.source, "--map", self._map, "--to", "embedding_new")
        by_old, by_new = (list(read_vectors_by_id(one).values()) for one in (asked_old, asked_new))
        answers = list(read_vectors_by_id(asked_old))
        assert answers == list(read_vectors_by_id(asked_new))
        lists: dict[str, Lists] = {"old model": [shop.nearest_ids(one, HITS) for one in by_old]}
        lists["naive: new queries, old vectors"] = [shop.nearest_ids(one, HITS) for one in by_new]
        lists |= self._dual(shop, by_old, by_new)
        shop.run_flip_statements([line.strip() for line in said.splitlines()])
        lists["mapped"] = [shop.nearest_ids(one, HITS) for one in by_new]
        self._report(lists, answers)
        shop.close()

    def _dual(
        self, shop: Shop, by_old: list[list[float]], by_new: list[list[float]]
    ) -> dict[str, Lists]:
        """Both models together, then with the hits embedded again, then with all of them."""
        lists: dict[str, Lists] = {}
        natives = self._folder / "natives.db"
        for file in self._folder.glob("natives.db*"):
            file.unlink()
        for name, healing in (("both", False), ("lazily", True)):
            source = open_searchable(shop.source, vector="embedding")
            embedder = open_embedder(str(self._wares.models[1]))
            dual = Dual.open(
                source, self._map, self._joining, natives, embedder,
                items=self._wares.open_item_source(source) if healing else None,
                limits=ReembeddingLimits(wait_seconds=PATIENCE), carried="embedding_new",
            )  # fmt: skip

            lists[name] = _searched(dual, by_old, by_new)
            if healing:
                while dual.heal(500):
                    pass
                self._say(
                    f"{dual.progress().native_item_count} of {len(self._wares.rows)} embedded again"
                )
                # As a search by the new model alone finds them, once the old one has gone.
                alone = NativeVectorFile(natives, embedder.fingerprint, len(by_new[0]))
                asked = (np.array([one], np.float32) for one in by_new)
                lists["re-embedded"] = [alone.nearest_ids(one, HITS) for one in asked]
                alone.close()
            dual.close()
            source.close()
        return lists

    def _report(self, lists: dict[str, Lists], answers: list[str]) -> None:
        order = (
            "old model", "naive: new queries, old vectors", "mapped", "both", "lazily",
            "re-embedded",
        )  # fmt: skip
        own = lists["re-embedded"]
        found = {name: compute_figures(lists[name], answers, own) for name in order}
        print_figures(found, len(self._wares.rows), len(answers), self._wares.name)
        told = {name: asdict(one) for name, one in found.items()}
        (self._folder / "figures.json").write_text(json.dumps(told, indent=1))
        self._say(f"the verdict's page: {(self._folder / 'verdict.html').as_uri()}")

    @property
    def _map(self) -> Path:
        return self._folder / "map.npz"

    @property
    def _joining(self) -> Path:
        return self._folder / "joining.npz"

    def _embed(self, name: str, items: Sequence[str | Path], model: Path) -> Path:
        out = self._folder / name
        self._command("embed", *items, "--with", model, "--out", out)
        return out

    def _command(self, *words: object) -> str:
        """Run `nobackfill` as a person does, and show what it says."""
        line = [str(word) for word in words]
        self._say(f"$ nobackfill {' '.join(line)}")
        program = Path(sys.executable).with_name("nobackfill")
        said = self._children.run(line[0], [program, *line])
        print("".join(f"    {one}\n" for one in said.splitlines()), end="", flush=True)
        return said

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._begun:5.0f} s] {line}", flush=True)


def _searched(dual: Dual, by_old: list[list[float]], by_new: list[list[float]]) -> Lists:
    found = [
        dual.search(np.array(a, np.float32), np.array(b, np.float32), HITS)
        for a, b in zip(by_old, by_new, strict=True)
    ]
    return [[hit.id for hit in one.hits] for one in found]


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of the packages with weights and texts; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which everything is written; results in it are reused.")
    ],
    images: Annotated[
        str | None,
        typer.Option(
            help="Use pictures instead of texts: a folder of them, or the word packages for those "
            "of the packages. Without it, the texts are used."
        ),
    ] = None,
    items: Annotated[
        int, typer.Option(min=100, help="Number of documents or pictures in the table.")
    ] = 4000,
    sampled: Annotated[
        int, typer.Option(min=50, help="Number of items that are re-embedded to fit the map on.")
    ] = 2000,
    queries: Annotated[
        int, typer.Option(min=20, help="Number of queries that each option is measured by.")
    ] = 500,
) -> None:
    """Move a table from one pretrained model to another, and say what each way keeps."""
    folder = out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _check_same(folder, [images, items, sampled, queries])
    wares: Wares
    if images is None:
        wares = Texts(packages, folder, items, queries)
    else:
        wares = Pictures(packages, folder, _pictures(images, packages, folder), items, queries)
    with Children(folder / "logs") as children:
        # At least half are left that no map has seen.
        Adoption(folder, wares, children).run(min(sampled, len(wares.rows) // 2))


def _check_same(folder: Path, asked: list[str | int | None]) -> None:
    """What is made is kept by the items' ids alone: a folder is for one kind of run. Raises
    InvalidInputError."""
    stamp, now = folder / "asked.json", json.dumps(asked)
    if stamp.is_file() and stamp.read_text("utf-8") != now:
        raise InvalidInputError(
            f"{folder}: expected vectors of a run with {now}, found those of "
            f"{stamp.read_text('utf-8')}; remove it, or give another --out"
        )
    stamp.write_text(now, "utf-8")


def _pictures(images: str, packages: Path, folder: Path) -> Path:
    """Where they are; those of packages are cut into tiles."""
    if images != "packages":
        return Path(images).absolute()
    print(f"pictures: {pictures.write_photo_tiles(packages, folder / 'pictures')}", flush=True)
    return folder / "pictures"


if __name__ == "__main__":
    # Two cores: two threads of the models are in each other's way.
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    try:
        typer.run(main)
    except NobackfillError as error:
        print(f"demo-adopt: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
