"""`nobackfill embed`: items by a model, and what a person is told of it on the way."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from nobackfill.adopt.embedding.asking import Asking
from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.embedding.items import read_items
from nobackfill.adopt.embedding.opening import open_embedder, reading
from nobackfill.adopt.embedding.vector_folder import embed_into
from nobackfill.errors import InvalidInputError
from nobackfill.terminal import visible


@dataclass(frozen=True)
class How:
    """The models, as the command's options name them; `pixels` as in open_embedder."""

    model: str
    name: str | None
    patience: float
    queries: bool
    query_encoder: str | None
    query_name: str | None
    pixels: Mapping[str, object]


def run(
    items: str, out: Path, how: How, *, column: str, key: str | None, only: Path | None,
    batch: int, show: Callable[[int], Callable[[int], None]],
) -> tuple[str, int]:  # fmt: skip
    """Embed what is missing; what to say of it, and how many items were refused. `show` counts up
    to a total."""
    wanted = None if only is None else _ids(only)
    found = read_items(items, column=column, key=key, only=wanted)
    if wanted is not None and (lost := sorted(wanted - set(found.ids))):
        _tell(f"{len(lost)} ids have no item, the first: {lost[0]}")
    if found.others:
        _tell(f"left out, hidden or no pictures by their names: {found.others}")
    embedder: Embedder = open_embedder(
        how.model, name=how.name, patience=how.patience, queries=how.queries, pixels=how.pixels
    )
    if told := reading(embedder):
        _tell(told)
    if how.query_encoder is not None:
        called = how.query_name or how.name
        encoder = open_embedder(how.query_encoder, name=called, patience=how.patience, queries=True)
        embedder = Asking(embedder, encoder)
    refused: dict[str, str] = {}
    try:
        made = embed_into(
            out, found, embedder, batch=batch, progress=show(len(found.ids)),
            refuse=refused.__setitem__,
        )  # fmt: skip
    finally:
        for name, why in refused.items():
            _tell(f"{name}: {why}")
    count = f"{len(refused)} refused, " if refused else ""
    return f"{made} embedded, {count}{len(found.ids) - len(refused)} in {out}", len(refused)


def _tell(line: str) -> None:
    print(visible(line), file=sys.stderr)


def _ids(path: Path) -> set[str]:
    try:
        return set(path.read_text("utf-8-sig").split("\n")) - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path}: cannot be read ({error})") from error
