"""A gallery filled from a place: pictures or texts sent to the gateway, or embedded on a Ray
cluster."""

import os
import re
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import quote

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
    UnusableOutputError,
)
from nobackfill.extras import extra, load_plugin
from nobackfill.images import LARGEST_BYTES, Pixels, read_file
from nobackfill.picture_files import HEIF_SUFFIXES, SUFFIXES, is_clutter, is_picture, suffix_refusal
from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.release.models import no_vector, read_verified
from nobackfill.server.embedding.embedding import Embedding, InProcessModels, size_of
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.upgrades.workers.cache import OpenCache, laid_out
from nobackfill.text import check_text, read_texts
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Vectors
from nobackfill.wire.gateway import Gateway
from nobackfill.wire.values import fill_value

if TYPE_CHECKING:
    # It needs the extra `postgres`.
    from nobackfill.server.upgrades.workers.workers import Cluster

# Where pictures lie: a folder, or a place that pyarrow knows (s3://BUCKET/PREFIX, gs://…).

# `scheme://KEY:SECRET@…`, also where nobody has escaped what SECRET is made of.
_SECRET = re.compile(r"://[^/@]*:.*@")
# Of an address, as it stands; spaces, letters beyond ASCII and the like are escaped here.
_SPELT = "%:/?@!$&'()*+,;=~"


class BulkPlace(Protocol):
    """Files by name: the path below the place, with forward slashes."""

    def names(self) -> Iterator[str]:
        """Of every file that is not hidden or a system's own, also of those that are no pictures;
        in the order of the names within a folder."""
        ...

    def read(self, name: str) -> bytes:
        """Raises InvalidInputError for what cannot be read, or is too large for a picture."""
        ...


def open_place(address: str) -> BulkPlace:
    """Raises NotFoundError where nothing is there, InvalidInputError for an address that is none or
    holds a secret, UnavailableError where a store does not answer or refuses, ConfigurationError
    without the extra `export`, which brings pyarrow."""
    return ObjectStore(address) if "://" in address else Folder(Path(address))


class Folder:
    """With all below it; a link to a folder is not entered, but named."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise NotFoundError(f"{root}: no such folder; give one with pictures, or s3://…")
        self._root = root

    def names(self) -> Iterator[str]:
        for folder, below, files in os.walk(self._root, onerror=_unreadable):
            links = [name for name in below if Path(folder, name).is_symlink()]
            below[:] = sorted(name for name in below if not is_clutter(name))
            inside = Path(folder).relative_to(self._root)
            names = sorted(name for name in (*files, *links) if not is_clutter(name))
            yield from ((inside / name).as_posix() for name in names)

    def read(self, name: str) -> bytes:
        return read_file(self._root / name)


class ObjectStore:
    """By pyarrow's file systems; credentials are where their own tools look for them."""

    def __init__(self, uri: str) -> None:
        with extra("export"):
            from pyarrow import fs, lib

        if _SECRET.search(uri):
            raise InvalidInputError(
                f"{_SECRET.sub('://…@', uri)}: expected an address without a secret, which every "
                "process of this machine could read; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY instead"
            )
        self._fs, self._failures = fs, (OSError, lib.ArrowException)
        self._shown = uri
        try:
            self._files, self._root = fs.FileSystem.from_uri(quote(uri, _SPELT, errors="replace"))
        except lib.ArrowException as error:
            raise InvalidInputError(
                f"{uri}: cannot be opened ({error}); write % and ? of a name as %25 and %3F"
            ) from error
        except OSError as error:
            raise self._failed(error) from error
        if not self._root:
            raise InvalidInputError(f"{uri}: expected a bucket, as in s3://BUCKET/PREFIX")
        kind = self._look()
        if kind == fs.FileType.File:
            raise InvalidInputError(f"{uri}: expected a bucket or a prefix, got one object")
        if kind != fs.FileType.Directory:
            raise NotFoundError(
                f"{uri}: nothing is there; look at the names of bucket and prefix, and at endpoint "
                "and region"
            )
        self._below = self._root.rstrip("/") + "/"

    def names(self) -> Iterator[str]:
        try:
            found = self._files.get_file_info(self._fs.FileSelector(self._below, recursive=True))
        except self._failures as error:
            raise self._failed(error) from error
        paths = sorted(one.path for one in found if one.type == self._fs.FileType.File)
        names = (path.removeprefix(self._below) for path in paths)
        return (name for name in names if not any(map(is_clutter, name.split("/"))))

    def read(self, name: str) -> bytes:
        """Raises UnavailableError, too, where nothing can be read there any more."""
        try:
            with self._files.open_input_stream(self._below + name, compression=None) as stream:
                data = bytes(stream.read(LARGEST_BYTES + 1))
        except FileNotFoundError as error:
            raise InvalidInputError("it is no longer there") from error
        except self._failures as error:
            # Of one picture, or of all that are left?
            self._look()
            raise InvalidInputError(f"cannot be read ({error})") from error
        if len(data) > LARGEST_BYTES:
            raise InvalidInputError(f"expected at most {LARGEST_BYTES} bytes, got more")
        return data

    def _look(self) -> object:
        """What kind of thing the place is. Raises UnavailableError."""
        try:
            return self._files.get_file_info(self._root).type
        except self._failures as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._shown}: cannot be read by {socket.gethostname()} ({error}); look at its "
            "address, and at that machine's network and credentials (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, ~/.aws), then put again"
        )


def _unreadable(error: OSError) -> None:
    raise InvalidInputError(f"{error.filename}: cannot be read ({error.strerror})") from error


# One batch of pictures or texts, embedded and put wherever it is called: what a worker is given.
#
# It may be repeated: an item that is there with the same content is left as it is.

# A worker that meets a gateway that is restarted asks again for so long.
_SECONDS = 120.0
# Files that say who calls: nobackfill.wire.connection.
CREDENTIALS = tuple(f"NOBACKFILL_{what}_FILE" for what in ("CA", "CERT", "KEY", "TOKEN"))


@dataclass(frozen=True)
class Filling:
    """Pictures of `place`, or texts, to put into a gallery. `models`: the release's, by their
    published paths; each is checked against its digest where it is opened. `credentials`: contents
    of files, by the variable that names them. Whoever sees this may write to the gallery."""

    key: str
    server: str
    gallery: str
    place: str
    manifest: Manifest = field(repr=False)
    models: Mapping[str, bytes] = field(repr=False)
    credentials: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Done:
    """`stored` items are durable; the others were refused, each with its reason."""

    stored: int
    refused: Mapping[str, str]


def models_of(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """What `Filling.models` holds. Raises VerificationError for files other than published."""
    return {file.path: read_verified(folder, file) for file in manifest.embedding_files()}


def credentials_of(environment: Mapping[str, str]) -> dict[str, bytes]:
    """What `Filling.credentials` holds. Raises OSError."""
    named = {name: environment[name] for name in CREDENTIALS if environment.get(name)}
    return {name: Path(path).read_bytes() for name, path in named.items()}


class _OpenBatch:
    """Models, and a connection."""

    def __init__(self, work: Filling, closing: ExitStack) -> None:
        self._work = work
        folder = laid_out(work.models, closing)
        models = InProcessModels(folder)
        models.load(work.manifest)
        self._embedding = Embedding(models, Metrics())
        for name, content in work.credentials.items():
            (folder / name).write_bytes(content)
            os.environ[name] = str(folder / name)
        self._gateway = closing.enter_context(Gateway(work.server, seconds=_SECONDS))

    @cached_property
    def _place(self) -> BulkPlace:
        return open_place(self._work.place)

    def put(self, names: Sequence[str]) -> Done:
        refused: dict[str, str] = {}
        decoded: list[tuple[str, Pixels]] = []
        size = size_of(self._work.manifest)
        for name in names:
            try:
                (found,) = self._embedding.decoding.each([self._place.read(name)], [size])
            except InvalidInputError as error:
                found = error
            if isinstance(found, InvalidInputError):
                refused[name] = str(found)
            else:
                decoded.append((name, found[size]))
        items = self._embedded(decoded, refused)
        refused |= self._gateway.put_items(self._work.gallery, items)
        return Done(len(names) - len(refused), refused)

    def read(self, texts: Sequence[pb.PutItem]) -> Done:
        manifest, refused, items = self._work.manifest, dict[str, str](), []
        rows = self._embedding.texts.rows(manifest, [one.text for one in texts], "document")
        for one, row in zip(texts, rows, strict=True):
            if isinstance(row, InvalidInputError):
                refused[one.id] = str(row)
                continue
            item = pb.PutItem()
            item.CopyFrom(one)
            # In place of the text.
            item.vectors.CopyFrom(_vectors(manifest, row))
            items.append(item)
        refused |= self._gateway.put_items(self._work.gallery, items)
        return Done(len(texts) - len(refused), refused)

    def _embedded(
        self, pictures: Sequence[tuple[str, Pixels]], refused: dict[str, str]
    ) -> list[pb.PutItem]:
        manifest = self._work.manifest
        while pictures:
            pixels = [one for _, one in pictures]
            try:
                embeddings = self._embedding.many(manifest, pixels)
                sides = self._embedding.sides(manifest, pixels)
                break
            except UnusableOutputError as error:
                refused |= {pictures[row][0]: str(no_vector(manifest)) for row in error.rows}
                pictures = [one for n, one in enumerate(pictures) if n not in error.rows]
        items = []
        for row, (name, _) in enumerate(pictures):
            vectors = _vectors(manifest, embeddings[row])
            if sides is not None:
                vectors.side_info.space = str(manifest.side_space)
                vectors.side_info.values = sides[row].astype("<f4").tobytes()
            items.append(pb.PutItem(id=name, vectors=vectors))
        return items


def _vectors(manifest: Manifest, embedding: Vectors) -> pb.Vectors:
    values = embedding.astype("<f4").tobytes()
    return pb.Vectors(embedding=types.Embedding(space=manifest.space, values=values))


_kept = OpenCache(_OpenBatch)


def put_batch(work: Filling, names: Sequence[str]) -> Done:
    """Embed and put the pictures of those names. Raises what open_place, ObjectStore.read and
    Gateway.put_items raise."""
    return _kept.of(work, work.key).put(names)


def put_texts(work: Filling, texts: Sequence[pb.PutItem]) -> Done:
    """The same of texts, which come with the call. Raises TooLargeError, too."""
    return _kept.of(work, work.key).read(texts)


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


def _items(pictures: BulkPlace, unsent: dict[str, str]) -> Iterator[pb.PutItem]:
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
    join: Callable[[str], Cluster] = load_plugin("workers", "ray")
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
    with closing(join(cluster)) as nodes:
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
                raise InvalidInputError(suffix_refusal(picture))
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
