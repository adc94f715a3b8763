"""Describe the source from which a gallery's items are re-embedded, and open it."""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import urllib3
from pydantic import SecretStr

from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    VerificationError,
)
from nobackfill.serving.reembedding import ReembeddingLimits
from nobackfill.serving.sources import (
    FolderItems,
    FunctionItems,
    ItemSource,
    JsonLinesItems,
    UrlItems,
)
from nobackfill.vectors import InputKind

FOLDER, TEXTS, COLUMN, FUNCTION = "folder:", "texts:", "column:", "function:"
# Files with this suffix are texts, all others images.
_TEXT_SUFFIX = ".txt"
MIN_HITS, MAX_HITS = 20, 200
# Limits of a source: least value, largest value, and the default for 0.
_NUMBERS: Mapping[str, tuple[float, float, float]] = {
    "hits": (MIN_HITS, MAX_HITS, 100),
    "seconds": (0.01, 30, 1),
    "bytes_a_query": (1 << 10, 1 << 30, 64 << 20),
    "concurrency": (1, 16, 2),
    "a_day": (1, 1_000_000_000, 100_000),
}


@dataclass(frozen=True)
class HealingSource:
    """Describe a source and its limits.

    Attributes:
        address: folder:DIR, folder:DIR/{id}.jpg, https://HOST/{id}.jpg, texts:FILE.jsonl,
            column:NAME or function:NAME.
        hits: number of first hits of a query that are re-embedded.
        seconds: longest wait of a query for them.
        bytes_a_query: most bytes that a query reads.
        concurrency: most batches at once.
        a_day: most items a day.
    """

    address: str
    hits: int
    seconds: float
    bytes_a_query: int
    concurrency: int
    a_day: int

    @classmethod
    def checked(cls, address: str, **numbers: float) -> Self:
        """Make a source with valid limits.

        Unknown names are ignored. NaN is refused. A fraction is neither refused nor rounded.

        Args:
            address: the address; it is checked when it is opened.
            numbers: limits by name, as the attributes; 0 and a missing one mean the default: 100
                hits, 1 second, 64 MiB, 2 batches, 100,000 items.

        Raises:
            InvalidInputError: a limit is out of its range.
            TypeError: a limit is no number.
        """
        values: dict[str, Any] = {}
        for name, (smallest, largest, default) in _NUMBERS.items():
            value = numbers.get(name, 0) or default
            if not smallest <= value <= largest:
                raise InvalidInputError(
                    f"source: {name}: expected {smallest:g} to {largest:g}, or 0 for the default "
                    f"{default:g}, got {value:g}; send another value"
                )
            values[name] = value
        return cls(address, **values)

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> Self:
        """Read a source from a gallery's state.

        Args:
            values: what `to_state` returned.

        Raises:
            VerificationError: a key is missing or unknown, or a value is out of its range or has
                another type, as from a newer version.
        """
        try:
            source = cls.checked(**values)
            # Numbers that are whole here must be so in a message.
            kinds = dict.fromkeys(_NUMBERS, (int,)) | {"address": (str,), "seconds": (int, float)}
            is_sound = source.to_state() == values and all(
                type(value) in kinds[name] for name, value in values.items()
            )
        except (TypeError, InvalidInputError):
            is_sound = False
        if not is_sound:
            raise VerificationError(
                "the gallery's source of originals was registered by a newer nobackfill, and this "
                "one cannot read the registration; update the gateway, or register the source "
                "again with `gateway update-gallery`"
            )
        return source

    def to_state(self) -> dict[str, Any]:
        """Encode the source for a gallery's state.

        All values are JSON.
        """
        return asdict(self)

    @property
    def limits(self) -> ReembeddingLimits:
        """Return the limits of a query and of a day; `hits` is not among them."""
        return ReembeddingLimits(
            wait_seconds=self.seconds,
            bytes_per_query=self.bytes_a_query,
            concurrent_batches=self.concurrency,
            items_per_day=self.a_day,
        )


class AllowedSources:
    """Open sources that the operator's settings allow; callers cannot name other places."""

    def __init__(
        self,
        folders: Sequence[Path],
        hosts: Collection[str],
        *,
        columns: Mapping[str, SecretStr],
        functions: Mapping[str, str],
    ) -> None:
        self._folders, self._hosts = [folder.resolve() for folder in folders], frozenset(hosts)
        self._columns, self._functions = columns, functions

    def open(self, source: HealingSource) -> ItemSource:
        """Open a source that the settings allow; a file of texts is read once, which may take
        seconds.

        A folder must lie in a folder of the settings after links are followed. Nothing is asked of
        a host or a database yet. Names that end in .txt are texts, all others images. Importing a
        function runs its module.

        Args:
            source: the source.

        Returns:
            An object that reads its items; the caller need not close it.

        Raises:
            ConfigurationError: the settings do not allow it, the address has another form, a
                column's database needs TLS, or a function cannot be imported.
            NotFoundError: a folder or file does not exist, or the file of texts cannot be read.
            InvalidInputError: the file of texts has an invalid line, or is no regular file.
            OSError: this user may not look into the folder.
            RuntimeError, ValueError: the path has a loop of links, or a zero byte.
        """
        if source.address.startswith(COLUMN):
            name = _check_name(source.address.removeprefix(COLUMN), self._columns, "item_columns")
            return _open_column(self._columns[name].get_secret_value())
        if source.address.startswith(FUNCTION):
            name = _check_name(
                source.address.removeprefix(FUNCTION), self._functions, "item_functions"
            )
            return FunctionItems(_import_function(self._functions[name]), None)
        if source.address.startswith(TEXTS):
            return JsonLinesItems(self._resolve(Path(source.address.removeprefix(TEXTS))))
        kind: InputKind = "text" if source.address.endswith(_TEXT_SUFFIX) else "image"
        if not source.address.startswith(FOLDER):
            host = _url_host(source.address)
            if not host:
                raise ConfigurationError(
                    "source: expected folder:DIR, folder:DIR/{id}.jpg, https://HOST/{id}, "
                    "texts:FILE.jsonl, column:NAME or function:NAME, got "
                    f"{source.address[:80]!r}; correct the address"
                )
            if host not in self._hosts:
                raise ConfigurationError(
                    f"source: host {host!r} is not in the setting item_hosts; the operator can add "
                    "it with `gateway serve --item-host HOST`"
                )
            return UrlItems(source.address, self._hosts, kind)
        folder, pattern = _split_template(source.address.removeprefix(FOLDER))
        path = self._resolve(folder)
        if not path.is_dir():
            raise NotFoundError(
                f"source: expected a folder of {kind}s at {folder}, found none; correct the "
                "address, or create the folder"
            )
        return FolderItems(path, pattern, kind)

    def _resolve(self, path: Path) -> Path:
        """Return a path without links.

        Raises:
            ConfigurationError: no folder of the settings has it.
        """
        resolved = path.resolve()
        if not any(resolved.is_relative_to(place) for place in self._folders):
            raise ConfigurationError(
                f"source: {path} is in no folder of the setting item_folders; the operator can add "
                "one with `gateway serve --item-folder DIR`"
            )
        return resolved


def _check_name(name: str, names: Collection[str], setting: str) -> str:
    """Check a name of the operator's settings.

    Raises:
        ConfigurationError: the settings do not have it.
    """
    if name not in names:
        raise ConfigurationError(
            f"source: {name[:80]!r} is not in the setting {setting}; the operator can add it to "
            "the file of `gateway serve --settings FILE`"
        )
    return name


def _open_column(address: str) -> ItemSource:
    from nobackfill.server.stores.postgresql.column_items import DatabaseColumnItems

    return DatabaseColumnItems(address)


def _import_function(name: str) -> Callable[[str], str | bytes | None]:
    """Import module:function of the operator's settings.

    Raises:
        ConfigurationError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.partition(":")
    try:
        member = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"item_functions: {name} cannot be imported ({type(error).__name__}: {error}); install "
            "its module in the gateway's Python, or correct the name in the file of `gateway serve "
            "--settings FILE`"
        ) from error
    if not callable(member):
        raise ConfigurationError(
            f"item_functions: {name} is not a function; name one that takes an item id and returns "
            "the item's text or bytes"
        )
    function: Callable[[str], str | bytes | None] = member
    return function


def _url_host(address: str) -> str | None:
    try:
        return urllib3.util.parse_url(address).host
    except urllib3.exceptions.LocationParseError:
        return None


def _split_template(text: str) -> tuple[Path, str]:
    """Split a folder from the part below it that has {id}."""
    parts = PurePosixPath(text).parts
    first = next((i for i, part in enumerate(parts) if "{id}" in part), len(parts))
    return Path(*parts[:first]), "/".join(parts[first:]) or "{id}"
