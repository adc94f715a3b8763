"""Texts and their vectors by pretrained models: embedded once, then kept.

`python -m bench.adoption.texts` writes them for `compare.py --vectors`.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import typer
from numpy.typing import NDArray

from demo.adoption.documents import (
    LONGEST,
    SHORTEST,
    Document,
    draw_by_seed,
    draw_documents,
    read_documents,
)
from demo.adoption.models import write_model_files
from nobackfill.adopt.embedding import open_embedder
from nobackfill.vectors import Vectors

_BATCH = 16
# Documents of a corpus that maps of many pairs are fitted on as well.
MORE = 3000
_ENTRY = re.compile(r"^Description-en: (.*)\n((?: .*\n?)*)", re.MULTILINE)


@dataclass(frozen=True)
class Corpus:
    """`name` in tables; documents whose titles are the queries, and others to fit on."""

    name: str
    documents: list[Document]
    more: list[Document]


@dataclass(frozen=True)
class EmbeddedDocuments:
    """Row i of both is document i: bodies [n, d], titles [n, d]."""

    bodies: Vectors
    titles: Vectors

    def part(self, rows: NDArray[np.int64]) -> Self:
        return replace(self, bodies=self.bodies[rows], titles=self.titles[rows])

    def first(self, count: int) -> Self:
        return self.part(np.arange(count))

    def write(self, file: Path) -> None:
        """Whole or not there, for a run that is killed."""
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_arrays(file, {"bodies": self.bodies, "titles": self.titles})

    @classmethod
    def read(cls, file: Path) -> Self:
        with np.load(file) as kept:
            return cls(kept["bodies"], kept["titles"])


def read_operations(packages: Path, count: int) -> Corpus:
    """Descriptions of operations that a package ships."""
    return _corpus("operations (botocore)", read_documents(packages), count)


def read_package_descriptions(lists: Path, count: int) -> Corpus:
    """Long descriptions of Debian's packages, from apt's Translation-en; the synopsis asks."""
    read = ["/usr/lib/apt/apt-helper", "cat-file", str(lists)]
    text = subprocess.run(read, capture_output=True, check=True).stdout.decode()
    found: dict[str, Document] = {}
    for entry in text.split("\n\n"):
        said = _ENTRY.search(entry)
        if said is None:
            continue
        lines = (line.strip() for line in said[2].splitlines())
        body = " ".join(line for line in lines if line != ".")[:LONGEST]
        if len(body) >= SHORTEST:
            found.setdefault(body, Document(said[1], body))
    return _corpus("descriptions (Debian)", found, count)


def _corpus(name: str, found: dict[str, Document], count: int) -> Corpus:
    first = draw_by_seed(found, count, 0)
    taken = {one.body for one in first}
    others = [one for body, one in found.items() if body not in taken]
    rows = np.random.default_rng(1).permutation(len(others))[:MORE]
    return Corpus(name, first, [others[row] for row in rows.tolist()])


def embed_documents(documents: list[Document], model: Path, file: Path) -> EmbeddedDocuments:
    """By an ONNX file, or from `file`, where an earlier run has kept them."""
    if not file.exists():
        embedder = open_embedder(str(model))

        def by_length(texts: list[str]) -> Vectors:
            order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
            parts = [
                embedder.embed([texts[row] for row in order[first : first + _BATCH]])
                for first in range(0, len(order), _BATCH)
            ]
            vectors = np.concatenate(parts)
            back = np.empty_like(vectors)
            back[order] = vectors
            return back

        bodies = by_length([one.body for one in documents])
        titles = by_length([one.title for one in documents])
        EmbeddedDocuments(bodies, titles).write(file)
    return EmbeddedDocuments.read(file)


def write_pairs(
    old: EmbeddedDocuments, new: EmbeddedDocuments, test_count: int, file: Path
) -> None:
    """Write bodies for `compare.py --vectors`: the first documents are tested, others are pairs."""
    arrays: dict[str, Vectors] = {}
    for name, vectors in (("old", old.bodies), ("new", new.bodies)):
        arrays[f"test_{name}"], arrays[name] = np.split(vectors, [test_count])
    _write_arrays(file, arrays)


def _write_arrays(file: Path, arrays: Mapping[str, Vectors]) -> None:
    """Write an .npz whole or not at all, for a run that is killed."""
    part = file.with_name(f"part-{file.name}")
    np.savez(part, allow_pickle=False, **arrays)
    part.replace(file)


def main(
    packages: Annotated[
        Path, typer.Option(help="Folder of packages as `make demo-adopt` fills it; only read.")
    ],
    out: Annotated[
        Path, typer.Option(help="Folder to which texts.npz is written, and models and vectors.")
    ],
    pairs: Annotated[int, typer.Option(help="Number of texts to fit maps on.")] = 10_000,
    tests: Annotated[
        int, typer.Option(help="Number of other texts that search each other.")
    ] = 2000,
) -> None:
    """Embed what botocore says of operations by MiniLM-L3 (old) and MiniLM-L6 (new)."""
    documents = draw_documents(packages, pairs + tests)
    models = zip(("L3", "L6"), write_model_files(packages, out / "models"), strict=True)
    old, new = (
        embed_documents(documents, model, out / f"{name}-{len(documents)}.npz")
        for name, model in models
    )
    write_pairs(old, new, tests, out / "texts.npz")


if __name__ == "__main__":
    typer.run(main)
