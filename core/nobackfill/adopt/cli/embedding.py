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
) -> str:  # fmt: skip
    """Embed what is missing, and say how many that were; `show` counts up to a total."""
    wanted = None if only is None else _ids(only)
    found = read_items(items, column=column, key=key, only=wanted)
    if wanted is not None and (lost := sorted(wanted - set(found.ids))):
        _tell(f"{len(lost)} ids have no item, the first: {lost[0]}")
    if found.others:
        _tell(f"left out, no JPEG, PNG or WebP by their names: {found.others}")
    embedder: Embedder = open_embedder(
        how.model, name=how.name, patience=how.patience, queries=how.queries, pixels=how.pixels
    )
    if told := reading(embedder):
        _tell(told)
    if how.query_encoder is not None:
        called = how.query_name or how.name
        encoder = open_embedder(how.query_encoder, name=called, patience=how.patience, queries=True)
        embedder = Asking(embedder, encoder)
    made = embed_into(out, found, embedder, batch=batch, progress=show(len(found.ids)))
    return f"{made} embedded, {len(found.ids)} in {out}"


def _tell(line: str) -> None:
    print(visible(line), file=sys.stderr)


def _ids(path: Path) -> set[str]:
    try:
        return set(path.read_text("utf-8-sig").split("\n")) - {""}
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(f"{path}: cannot be read ({error})") from error
