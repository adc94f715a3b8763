"""A gallery filled from a place: pictures or texts sent to the gateway, or embedded on a Ray
cluster."""

import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TypeVar

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.picture_files import HEIF_SUFFIXES, SUFFIXES, is_picture, not_taken
from nobackfill.release.parsing import parse_manifest
from nobackfill.server.bulk.batch import (
    Done,
    Filling,
    credentials_of,
    models_of,
    put_batch,
    put_texts,
)
from nobackfill.server.bulk.places import Place, open_place
from nobackfill.text_lines import read_texts
from nobackfill.tokenizing import check_text
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.wire.gateway import Gateway
from nobackfill.wire.values import fill_value

# Items of a task: a minute of a large network's work on one core.
BATCH = 64
One = TypeVar("One")


def fill(
    gateway: Gateway, gallery: str, place: str, on_stored: Callable[[int], object] = lambda _: None
) -> Done:
    """Send every picture of `place`, as the item of its name, or every text of a JSONL file; the
    gateway embeds it.

    `on_stored` is called with how many are durable. Raises as open_place, ObjectStore.read
    and Gateway.put_items; what was stored until then stays, and filling again is right.
    """
    unsent: dict[str, str] = {}
    stored = 0

    def count(many: int) -> None:
        nonlocal stored
        stored = many
        on_stored(many)

    items = _texts_of(place, unsent) if is_texts(place) else _items(open_place(place), unsent)
    refused = gateway.put_items(gallery, items, count)
    return _some(Done(stored, {**refused, **unsent}), place)


def is_texts(place: str) -> bool:
    """Whether a place is a file of texts."""
    return "://" not in place and place.endswith(".jsonl")


def _texts_of(place: str, unsent: dict[str, str]) -> Iterator[pb.PutItem]:
    for one in read_texts(Path(place), unsent):
        try:
            item = pb.PutItem(id=_text(one.id), text=check_text(one.text))
            for key, value in one.metadata().items():
                fill_value(value, item.metadata[key])
        except InvalidInputError as error:
            unsent[_shown(one.id)] = str(error)
        else:
            yield item


def _items(pictures: Place, unsent: dict[str, str]) -> Iterator[pb.PutItem]:
    for name in _pictures(pictures.names(), unsent):
        try:
            yield pb.PutItem(id=name, image=pictures.read(name))
        except InvalidInputError as error:
            unsent[name] = str(error)


def fill_by_ray(
    gateway: Gateway, gallery: str, place: str, models: Path, cluster: str,
    on_stored: Callable[[int], object] = lambda _: None, batch: int = BATCH,
) -> Done:  # fmt: skip
    """The same, embedded by the nodes of the Ray cluster at `cluster`, with the models of the
    gallery's release from the publication folder `models`; each node reads pictures of `place`
    (texts are read here) and reaches the gateway by the same address.

    Items are vectors of that release alone. Raises VerificationError for other models,
    ConfigurationError, UnavailableError, and what put_batch raises.
    """
    from nobackfill.server.upgrades.workers.ray_cluster import RayCluster

    release = gateway.get_gallery(gallery).release
    published = next(one for one in gateway.list_releases() if one.number == release)
    manifest = parse_manifest(published.manifest, release)
    try:
        credentials = credentials_of(os.environ)
    except OSError as error:
        raise ConfigurationError(f"{error.filename}: cannot be read ({error.strerror})") from error
    work = Filling(
        uuid.uuid4().hex, gateway.address, gallery, _absolute(place), manifest,
        models_of(models, manifest), credentials,
    )  # fmt: skip
    stored, refused = 0, dict[str, str]()
    with closing(RayCluster(cluster)) as nodes:
        if is_texts(place):
            texts = _texts_of(place, refused)
            parts = nodes.run(put_texts, work, _batches(texts, batch))
        else:
            names = _pictures(open_place(place).names(), refused)
            parts = nodes.run(put_batch, work, _batches(names, batch))
        for done in parts:
            stored += done.stored
            refused |= done.refused
            on_stored(stored)
    return _some(Done(stored, refused), place)


def _some(done: Done, place: str) -> Done:
    """Raises InvalidInputError for a place without pictures."""
    if not done.stored and not done.refused:
        raise InvalidInputError(
            f"{place}: expected pictures ({', '.join(SUFFIXES + HEIF_SUFFIXES)}) or texts, found "
            "none"
        )
    return done


def _absolute(place: str) -> str:
    return place if "://" in place else str(Path(place).resolve())


def _batches(names: Iterable[One], size: int) -> Iterator[Sequence[One]]:
    left = iter(names)
    while some := list(islice(left, size)):
        yield some


def _pictures(names: Iterable[str], refused: dict[str, str]) -> Iterator[str]:
    for name in names:
        try:
            picture = _text(name)
            if not is_picture(picture):
                raise InvalidInputError(not_taken(picture))
            yield picture
        except InvalidInputError as error:
            refused[_shown(name)] = str(error)


def _text(name: str) -> str:
    """Raises InvalidInputError for a name that no message can carry."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError("its name is not valid text; rename it") from error
    return name


def _shown(name: str) -> str:
    return name.encode("utf-8", "replace").decode()
