"""Fill a gallery from a folder, an object store or a file of texts, through the gateway or
on Ray.
"""

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
from nobackfill.extras import load_plugin, require_extra
from nobackfill.images import LARGEST_IMAGE_BYTES, Pixels, read_file
from nobackfill.picture_files import (
    HEIF_SUFFIXES,
    PICTURE_SUFFIXES,
    explain_refused_suffix,
    is_hidden_or_system,
    is_picture,
)
from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.release.models import no_vector_error, read_verified_file
from nobackfill.server.embedding.embedding import EmbeddingService, InProcessModels
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.upgrades.workers.cache import OpenCache, write_files
from nobackfill.text import check_text, read_text_lines
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1 import types_pb2 as types
from nobackfill.vectors import Vectors
from nobackfill.wire.gateway import Gateway
from nobackfill.wire.values import fill_metadata

if TYPE_CHECKING:
    # It needs the extra `postgres`.
    from nobackfill.server.upgrades.workers.workers import Cluster


# Matches `scheme://KEY:SECRET@…`, also if SECRET is not escaped.
_SECRET = re.compile(r"://[^/@]*:.*@")
# Characters of an address that stay as they are; others, such as spaces, are escaped.
_SAFE_CHARACTERS = "%:/?@!$&'()*+,;=~"


class BulkSource(Protocol):
    """List and read files by name: the path below the place, with forward slashes."""

    def names(self) -> Iterator[str]:
        """Yield every file that is neither hidden nor a system's own, pictures or not, sorted in
        each folder; nothing for an empty place.

        Raises:
            InvalidInputError: a folder cannot be read; raised when it is reached.
            UnavailableError: the place itself cannot be read.
        """

    def read(self, name: str) -> bytes:
        """Return the bytes of a file.

        Args:
            name: a name from `names`.

        Raises:
            InvalidInputError: it cannot be read, was deleted, or is too large for a picture.
            UnavailableError: the place itself cannot be read any more.
        """


def open_bulk_source(address: str) -> BulkSource:
    """Open a folder or an object store; there is nothing to close.

    Args:
        address: a path, or an address that pyarrow knows, such as s3://BUCKET/PREFIX. `://` makes
            it one.

    Raises:
        NotFoundError: nothing is there, or the path is a file.
        InvalidInputError: the address is not valid, has a secret, or names one object.
        UnavailableError: the store does not answer, or refuses.
        ConfigurationError: pyarrow, of the extra `export`, is not installed.
    """
    return ObjectStore(address) if "://" in address else Folder(Path(address))


class Folder:
    """Read a folder with all folders below it; a link to a folder is named, but not entered."""

    def __init__(self, root: Path) -> None:
        """Open the folder; nothing in it is read yet.

        Args:
            root: the folder, or a link to one.

        Raises:
            NotFoundError: it does not exist, or is a file.
        """
        if not root.is_dir():
            failure = "is not a folder" if root.exists() else "no such folder"
            raise NotFoundError(
                f"{root}: {failure}; expected a folder of pictures, s3://BUCKET/PREFIX, "
                "gs://BUCKET/PREFIX, or a file of texts FILE.jsonl"
            )
        self._root = root

    def names(self) -> Iterator[str]:
        """Yield every file below the folder that is neither hidden nor a system's own, pictures or
        not.

        Names are sorted in each folder, and files come before folders. A link to a folder is named,
        but not entered. An empty folder gives nothing.

        Raises:
            InvalidInputError: a folder cannot be read; raised when it is reached.
        """
        for folder, subfolders, files in os.walk(self._root, onerror=_raise_unreadable):
            links = [name for name in subfolders if Path(folder, name).is_symlink()]
            subfolders[:] = sorted(name for name in subfolders if not is_hidden_or_system(name))
            relative = Path(folder).relative_to(self._root)
            names = sorted(name for name in (*files, *links) if not is_hidden_or_system(name))
            yield from ((relative / name).as_posix() for name in names)

    def read(self, name: str) -> bytes:
        """Return the bytes of a file; a link is followed.

        Args:
            name: a name from `names`.

        Raises:
            InvalidInputError: it cannot be read, was deleted, is no file, or is too large for a
                picture.
        """
        return read_file(self._root / name)


class ObjectStore:
    """Read an object store by pyarrow's file systems, which find credentials where their
    tools do.
    """

    def __init__(self, uri: str) -> None:
        """Connect to the store, and look whether the prefix exists.

        Args:
            uri: address such as s3://BUCKET/PREFIX, without a secret.

        Raises:
            InvalidInputError: the address has a secret or no bucket, cannot be parsed, or names one
                object.
            NotFoundError: nothing has this prefix.
            UnavailableError: the store does not answer, or refuses.
            ConfigurationError: pyarrow, of the extra `export`, is not installed.
        """
        with require_extra("export"):
            from pyarrow import fs, lib

        if _SECRET.search(uri):
            raise InvalidInputError(
                f"{_SECRET.sub('://…@', uri)}: expected an address without a secret, which every "
                "process of this machine could read; set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY instead"
            )
        self._fs, self._failures = fs, (OSError, lib.ArrowException)
        self._address = uri
        try:
            self._files, self._root = fs.FileSystem.from_uri(
                quote(uri, _SAFE_CHARACTERS, errors="replace")
            )
        except lib.ArrowException as error:
            raise InvalidInputError(
                f"{uri}: this address cannot be opened ({error}); correct it, and write % as %25 "
                "and ? as %3F in names"
            ) from error
        except OSError as error:
            raise self._unavailable_error(error) from error
        if not self._root:
            raise InvalidInputError(
                f"{uri}: expected the name of a bucket, as in s3://BUCKET/PREFIX, found none; "
                "correct the address"
            )
        kind = self._place_type()
        if kind == fs.FileType.File:
            raise InvalidInputError(
                f"{uri}: expected a bucket or a prefix, got the address of one object; name the "
                "prefix that contains it"
            )
        if kind != fs.FileType.Directory:
            raise NotFoundError(
                f"{uri}: nothing is there; check the names of bucket and prefix, the endpoint "
                "and the region"
            )
        self._prefix = self._root.rstrip("/") + "/"

    def names(self) -> Iterator[str]:
        """Return an iterator over every object below the prefix that is neither hidden nor a
        system's own, pictures or not.

        All names are listed at once, before the first is yielded, and sorted.

        Raises:
            UnavailableError: the store does not answer, or refuses.
        """
        try:
            infos = self._files.get_file_info(self._fs.FileSelector(self._prefix, recursive=True))
        except self._failures as error:
            raise self._unavailable_error(error) from error
        paths = sorted(info.path for info in infos if info.type == self._fs.FileType.File)
        names = (path.removeprefix(self._prefix) for path in paths)
        return (name for name in names if not any(map(is_hidden_or_system, name.split("/"))))

    def read(self, name: str) -> bytes:
        """Return the bytes of an object; nothing is decompressed.

        Args:
            name: a name from `names`.

        Raises:
            InvalidInputError: it cannot be read, was deleted, or is too large for a picture.
            UnavailableError: nothing can be read from the store any more.
        """
        try:
            with self._files.open_input_stream(self._prefix + name, compression=None) as stream:
                data = bytes(stream.read(LARGEST_IMAGE_BYTES + 1))
        except FileNotFoundError as error:
            raise InvalidInputError(
                "this object was deleted before it was read; upload it again, or ignore this error"
            ) from error
        except self._failures as error:
            # Raises if the store itself fails, not only this object.
            self._place_type()
            raise InvalidInputError(
                f"this object cannot be read ({error}); check its permissions, then run the "
                "command again"
            ) from error
        if len(data) > LARGEST_IMAGE_BYTES:
            raise InvalidInputError(
                f"expected a picture of at most {LARGEST_IMAGE_BYTES} bytes, found more; store a "
                "smaller copy"
            )
        return data

    def _place_type(self) -> object:
        """Return the type of the place.

        Raises:
            UnavailableError: the store does not answer.
        """
        try:
            return self._files.get_file_info(self._root).type
        except self._failures as error:
            raise self._unavailable_error(error) from error

    def _unavailable_error(self, error: Exception) -> UnavailableError:
        return UnavailableError(
            f"{self._address}: cannot be read by {socket.gethostname()} ({error}); check the "
            "address, and that machine's network and credentials (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, ~/.aws), then run the command again"
        )


def _raise_unreadable(error: OSError) -> None:
    raise InvalidInputError(
        f"{error.filename}: this folder cannot be read ({error.strerror}); check its permissions, "
        "then run the command again"
    ) from error


# A worker embeds and puts one batch of pictures or texts. A batch may be repeated: an item with the
# same content stays as it is.

# A worker retries for so long (seconds) while the gateway restarts.
_RETRY_SECONDS = 120.0
# Variables that name files with the caller's credentials; see nobackfill.wire.connection.
CREDENTIALS = tuple(f"NOBACKFILL_{what}_FILE" for what in ("CA", "CERT", "KEY", "TOKEN"))


@dataclass(frozen=True)
class FillWork:
    """Describe the work of filling a gallery to workers.

    It is a secret: with its credentials, a reader can write to the gallery.

    Attributes:
        cache_key: identifies the work, so that a worker opens models once.
        gateway_address: address of the gateway.
        gallery: name of the gallery.
        source_address: address of the pictures.
        manifest: the gallery's release.
        model_files: content of its model files by published path; each is checked against its
            digest.
        credential_files: content of credential files by the variable that names them.
    """

    cache_key: str
    gateway_address: str
    gallery: str
    source_address: str
    manifest: Manifest = field(repr=False)
    model_files: Mapping[str, bytes] = field(repr=False)
    credential_files: Mapping[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class FillResult:
    """Report a fill.

    Attributes:
        stored_count: number of items that are durable at the gateway.
        refusals: reason by id of each item that was not stored.
    """

    stored_count: int
    refusals: Mapping[str, str]


def read_model_files(folder: Path, manifest: Manifest) -> dict[str, bytes]:
    """Read the model files of a release into memory, by their published paths, as bytes.

    They are the files that embed images, texts and side-information; upgrades are left out.

    Args:
        folder: the publication folder.
        manifest: the release.

    Raises:
        VerificationError: a file is missing, cannot be read, or does not match its signed digest.
    """
    return {file.path: read_verified_file(folder, file) for file in manifest.embedding_files()}


def read_credential_files(environment: Mapping[str, str]) -> dict[str, bytes]:
    """Read the credential files that the environment names.

    Args:
        environment: the variables; CREDENTIALS that are missing or empty are skipped.

    Returns:
        The content of each file, by the variable that names it.

    Raises:
        OSError: a file cannot be read.
    """
    paths = {name: environment[name] for name in CREDENTIALS if environment.get(name)}
    return {name: Path(path).read_bytes() for name, path in paths.items()}


class _OpenBatch:
    """Hold a worker's models and connection."""

    def __init__(self, work: FillWork, closing: ExitStack) -> None:
        self._work = work
        folder = write_files(work.model_files, closing)
        models = InProcessModels(folder)
        models.load(work.manifest)
        self._embedding = EmbeddingService(models, Metrics())
        for name, content in work.credential_files.items():
            (folder / name).write_bytes(content)
            os.environ[name] = str(folder / name)
        self._gateway = closing.enter_context(Gateway(work.gateway_address, seconds=_RETRY_SECONDS))

    @cached_property
    def _place(self) -> BulkSource:
        return open_bulk_source(self._work.source_address)

    def put(self, names: Sequence[str]) -> FillResult:
        refusals: dict[str, str] = {}
        decoded: list[tuple[str, Pixels]] = []
        size = self._work.manifest.frame
        for name in names:
            try:
                (pixels,) = self._embedding.decoder.decode_each([self._place.read(name)], [size])
            except InvalidInputError as error:
                pixels = error
            if isinstance(pixels, InvalidInputError):
                refusals[name] = str(pixels)
            else:
                decoded.append((name, pixels[size]))
        items = self._embed(decoded, refusals)
        refusals |= self._gateway.put_items(self._work.gallery, items)
        return FillResult(len(names) - len(refusals), refusals)

    def read(self, texts: Sequence[pb.PutItem]) -> FillResult:
        manifest, refusals, items = self._work.manifest, dict[str, str](), []
        rows = self._embedding.embed_each_text(manifest, [text.text for text in texts], "document")
        for text, row in zip(texts, rows, strict=True):
            if isinstance(row, InvalidInputError):
                refusals[text.id] = str(row)
                continue
            item = pb.PutItem()
            item.CopyFrom(text)
            # Vectors replace the text.
            item.vectors.CopyFrom(_vectors_message(manifest, row))
            items.append(item)
        refusals |= self._gateway.put_items(self._work.gallery, items)
        return FillResult(len(texts) - len(refusals), refusals)

    def _embed(
        self, pictures: Sequence[tuple[str, Pixels]], refusals: dict[str, str]
    ) -> list[pb.PutItem]:
        manifest = self._work.manifest
        while pictures:
            pixels = [picture for _, picture in pictures]
            try:
                embeddings = self._embedding.embed_images(manifest, pixels)
                sides = self._embedding.compute_side(manifest, pixels)
                break
            except UnusableOutputError as error:
                refusals |= {
                    pictures[row][0]: str(no_vector_error(manifest)) for row in error.unusable_rows
                }
                pictures = [
                    picture for n, picture in enumerate(pictures) if n not in error.unusable_rows
                ]
        items = []
        for row, (name, _) in enumerate(pictures):
            vectors = _vectors_message(manifest, embeddings[row])
            if sides is not None:
                vectors.side_info.space = str(manifest.side_space)
                vectors.side_info.values = sides[row].astype("<f4").tobytes()
            items.append(pb.PutItem(id=name, vectors=vectors))
        return items


def _vectors_message(manifest: Manifest, embedding: Vectors) -> pb.Vectors:
    values = embedding.astype("<f4").tobytes()
    return pb.Vectors(embedding=types.Embedding(space=manifest.space, values=values))


_open_batches = OpenCache(_OpenBatch)


def put_pictures(work: FillWork, names: Sequence[str]) -> FillResult:
    """Embed pictures of the work's place in this process, and put them into the gallery.

    The first call for a work opens its models and a connection to the gateway; they stay open until
    the first call for another work. It also sets the variables CREDENTIALS of this process. Calling
    it again for the same pictures is safe.

    Args:
        work: the work.
        names: names of the pictures; empty stores nothing.

    Returns:
        The number of stored items, and the reason of each refused picture.

    Raises:
        NotFoundError: the place or the gallery does not exist.
        NoEncoderError: the gallery's release embeds no images.
        UnavailableError: the place or, for two minutes, the gateway does not answer.
        VerificationError: a model file does not match its signed digest.
        ConfigurationError: pyarrow is not installed, or a credential cannot be used.
        NotPermittedError: the token may not write to the gallery.
        NobackfillError: any other error of open_bulk_source and Gateway.put_items.
        InvalidInputError: the address of the place is not valid.
        OSError: the disk of temporary files cannot be written.
        ItemQuotaError: the galleries of the token hold as many items as it may store.
    """
    return _open_batches.open_for(work, work.cache_key).put(names)


def put_texts(work: FillWork, texts: Sequence[pb.PutItem]) -> FillResult:
    """Embed texts in this process, as documents, and put them into the gallery.

    Models and the connection are opened and kept as in put_pictures. Calling it again for the same
    texts is safe.

    Args:
        work: the work.
        texts: items with an id and a text; their metadata is stored as well. They are not changed.

    Returns:
        The number of stored items, and the reason of each refused text.

    Raises:
        NoEncoderError: the gallery's release embeds no texts.
        TooLargeError: the texts are too large for one call.
        NotFoundError: the gallery does not exist.
        UnavailableError: for two minutes, the gateway does not answer.
        VerificationError: a model file does not match its signed digest.
        ConfigurationError: the extra `text` is not installed, or a credential cannot be used.
        NobackfillError: any other error of Gateway.put_items.
        ItemQuotaError: the galleries of the token hold as many items as it may store.
        NotPermittedError: the token may not write to the gallery.
        OSError: the disk of temporary files cannot be written.
    """
    return _open_batches.open_for(work, work.cache_key).read(texts)


# Items of a task: a minute of work of a large network on one core.
BATCH = 64
One = TypeVar("One")


def fill(
    gateway: Gateway,
    gallery: str,
    source_address: str,
    on_stored: Callable[[int], object] = lambda _: None,
) -> FillResult:
    """Put all pictures of a place, or all texts of a JSONL file; the gateway embeds them.

    Items that were stored before an error stay. Filling again is safe: an item with the same
    content stays as it is, and other content replaces it. Files are read one at a time. A file that
    is no picture, and a line that is not valid, is refused and named; the others go on.

    Args:
        gateway: the gateway.
        gallery: name of the gallery.
        source_address: a folder, an object store, or FILE.jsonl. A picture's id is its path in the
            place.
        on_stored: called with the number of durable items so far, after each part; its errors end
            the fill.

    Returns:
        The number of stored items, and the reason of each refused picture or line. A line without a
        usable id is named FILE:LINE.

    Raises:
        InvalidInputError: the place has no files or texts, or cannot be read.
        NotFoundError: the place or the gallery does not exist.
        UnavailableError: the place or the gateway does not answer.
        NotPermittedError: the token may not write to the gallery.
        ItemQuotaError: the galleries of the token hold as many items as it may store.
        ValueError: the connection of `gateway` was closed.
        ConfigurationError: the place needs pyarrow, which is not installed.
        NobackfillError: any other error of open_bulk_source and Gateway.put_items.
    """
    unsent: dict[str, str] = {}
    stored = 0

    def report(count: int) -> None:
        nonlocal stored
        stored = count
        on_stored(count)

    items = (
        _text_put_items(source_address, unsent)
        if is_text_file(source_address)
        else _picture_put_items(open_bulk_source(source_address), unsent)
    )
    refused = gateway.put_items(gallery, items, report)
    return _check_result(FillResult(stored, {**refused, **unsent}), source_address)


def is_text_file(address: str) -> bool:
    """Tell whether a place is a local file of texts, by its name alone: it ends with .jsonl, in
    small letters.
    """
    return "://" not in address and address.endswith(".jsonl")


def _text_put_items(place: str, unsent: dict[str, str]) -> Iterator[pb.PutItem]:
    for text in read_text_lines(Path(place), unsent):
        try:
            item = pb.PutItem(id=_check_name(text.id), text=check_text(text.text))
            fill_metadata(text.metadata(), item.metadata)
        except InvalidInputError as error:
            unsent[_printable_name(text.id)] = str(error)
        else:
            yield item


def _picture_put_items(pictures: BulkSource, unsent: dict[str, str]) -> Iterator[pb.PutItem]:
    for name in _picture_names(pictures.names(), unsent):
        try:
            yield pb.PutItem(id=name, image=pictures.read(name))
        except InvalidInputError as error:
            unsent[name] = str(error)


def fill_by_ray(
    gateway: Gateway, gallery: str, source_address: str, model_repo: Path, cluster_address: str,
    on_stored: Callable[[int], object] = lambda _: None, batch_size: int = BATCH,
) -> FillResult:  # fmt: skip
    """Put all pictures of a place, or all texts of a JSONL file, embedded on a Ray cluster.

    Each node reads pictures of `source_address` itself, and must reach the gateway by the same
    address; texts are read here. Items get vectors of the gallery's release only. Items that were
    stored before an error stay, and filling again is safe. The nodes get the content of this
    process's credential files.

    Args:
        gateway: the gateway; only its address is used by the nodes.
        gallery: name of the gallery.
        source_address: as in `fill`; a relative path counts from this process's folder.
        model_repo: publication folder with the gallery's release; its model files are sent to the
            nodes.
        cluster_address: address of the Ray cluster HOST:PORT, or auto for the one on this machine.
        on_stored: called with the number of durable items so far, after each task; its errors end
            the fill.
        batch_size: items of a task, at least 1.

    Returns:
        As `fill`.

    Raises:
        InvalidInputError: the place has no files or texts, or cannot be read.
        NotFoundError: the place or the gallery does not exist, or the gallery's release is
            published no more.
        VerificationError: a model's file is missing, or does not match its signed digest; or this
            program cannot use the gallery's release (UnfitError).
        ConfigurationError: Ray is not installed, or a credential file cannot be read.
        UnavailableError: the gateway or the cluster does not answer, or its workers end again and
            again.
        NotPermittedError: the token may not read or write the gallery.
        NobackfillError: any other error of put_pictures and put_texts.
        ItemQuotaError: the galleries of the token hold as many items as it may store.
        ValueError: the connection of `gateway` was closed.
        NoEncoderError: the release embeds no pictures, or no texts.
        TooLargeError: the texts of a task are too large for one call.
    """
    release = gateway.get_gallery(gallery).release
    manifest = parse_manifest(gateway.get_release(release).manifest, release)
    join: Callable[[str], Cluster] = load_plugin("workers", "ray")
    try:
        credentials = read_credential_files(os.environ)
    except OSError as error:
        raise ConfigurationError(
            f"{error.filename}: this credential file cannot be read ({error.strerror}); check the "
            f"variables {', '.join(CREDENTIALS)}"
        ) from error
    work = FillWork(
        uuid.uuid4().hex, gateway.address, gallery, _absolute_place(source_address), manifest,
        read_model_files(model_repo, manifest), credentials,
    )  # fmt: skip
    stored, refusals = 0, dict[str, str]()
    with closing(join(cluster_address)) as nodes:
        if is_text_file(source_address):
            texts = _text_put_items(source_address, refusals)
            parts = nodes.run(put_texts, work, _batches(texts, batch_size))
        else:
            names = _picture_names(open_bulk_source(source_address).names(), refusals)
            parts = nodes.run(put_pictures, work, _batches(names, batch_size))
        for result in parts:
            stored += result.stored_count
            refusals |= result.refusals
            on_stored(stored)
    return _check_result(FillResult(stored, refusals), source_address)


def _check_result(result: FillResult, place: str) -> FillResult:
    """Return the result of a fill.

    Raises:
        InvalidInputError: the place has no pictures or texts.
    """
    if not result.stored_count and not result.refusals:
        raise InvalidInputError(
            f"{place}: expected pictures ({', '.join(PICTURE_SUFFIXES + HEIF_SUFFIXES)}), or "
            "lines of texts in a file FILE.jsonl, found none; correct the folder, address or file"
        )
    return result


def _absolute_place(place: str) -> str:
    return place if "://" in place else str(Path(place).resolve())


def _batches(names: Iterable[One], size: int) -> Iterator[Sequence[One]]:
    iterator = iter(names)
    while batch := list(islice(iterator, size)):
        yield batch


def _picture_names(names: Iterable[str], refusals: dict[str, str]) -> Iterator[str]:
    for name in names:
        try:
            picture = _check_name(name)
            if not is_picture(picture):
                raise InvalidInputError(explain_refused_suffix(picture))
            yield picture
        except InvalidInputError as error:
            refusals[_printable_name(name)] = str(error)


def _check_name(name: str) -> str:
    """Return a name that can be sent.

    Raises:
        InvalidInputError: the name is not valid UTF-8.
    """
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidInputError(
            "the name of this file is not valid UTF-8; rename the file"
        ) from error
    return name


def _printable_name(name: str) -> str:
    return name.encode("utf-8", "replace").decode()
