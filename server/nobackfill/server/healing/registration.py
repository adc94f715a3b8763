"""The source of images or texts that a gallery is registered with, and what it may cost."""

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Self

import urllib3
from pydantic import SecretStr

from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.serving.reembedding import Limits
from nobackfill.serving.sources import FolderItems, FunctionItems, Items, LineItems, UrlItems
from nobackfill.vectors import Kind

FOLDER, TEXTS, COLUMN, FUNCTION = "folder:", "texts:", "column:", "function:"
# Files of this kind are texts, all others images.
_PLAIN = ".txt"
LEAST_HITS, MOST_HITS = 20, 200
# Numbers of a source: what is least, most, and meant by 0.
_NUMBERS: Mapping[str, tuple[float, float, float]] = {
    "hits": (LEAST_HITS, MOST_HITS, 100),
    "seconds": (0.01, 30, 1),
    "bytes_a_query": (1 << 10, 1 << 30, 64 << 20),
    "concurrency": (1, 16, 2),
    "a_day": (1, 1_000_000_000, 100_000),
}


@dataclass(frozen=True)
class HealingSource:
    """`address`: folder:DIR, folder:DIR/{id}.jpg, an address on a named host with {id} in its
    path, texts:FILE.jsonl, column:NAME or function:NAME. `hits`: first ones of a query that are
    embedded again; the others as in Limits."""

    address: str
    hits: int
    seconds: float
    bytes_a_query: int
    concurrency: int
    a_day: int

    @classmethod
    def checked(cls, address: str, **numbers: float) -> Self:
        """0 for what is usual. Raises InvalidInputError."""
        values: dict[str, Any] = {}
        for name, (least, most, usual) in _NUMBERS.items():
            value = numbers.get(name, 0) or usual
            if not least <= value <= most:
                raise InvalidInputError(
                    f"source, {name}: expected {least:g} to {most:g}, got {value:g}"
                )
            values[name] = value
        return cls(address, **values)

    @classmethod
    def from_state(cls, kept: Mapping[str, Any]) -> Self:
        """As a gallery keeps it."""
        return cls(**kept)

    def to_state(self) -> dict[str, Any]:
        """For `from_state`."""
        return asdict(self)

    @property
    def limits(self) -> Limits:
        """The limits of a query, and of a day."""
        return Limits(
            seconds=self.seconds,
            bytes_a_query=self.bytes_a_query,
            concurrency=self.concurrency,
            a_day=self.a_day,
        )


class Places:
    """Where sources may lie, as the operator's settings name it: whoever may change a gallery names
    none of them."""

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

    def open(self, source: HealingSource) -> Items:
        """Raises ConfigurationError, NotFoundError for a folder that is not there."""
        if source.address.startswith(COLUMN):
            name = _named(source.address.removeprefix(COLUMN), self._columns, "item_columns")
            return _column(self._columns[name].get_secret_value())
        if source.address.startswith(FUNCTION):
            name = _named(source.address.removeprefix(FUNCTION), self._functions, "item_functions")
            return FunctionItems(_function(self._functions[name]), None)
        if source.address.startswith(TEXTS):
            return LineItems(self._below(Path(source.address.removeprefix(TEXTS))))
        kind: Kind = "text" if source.address.endswith(_PLAIN) else "image"
        if not source.address.startswith(FOLDER):
            host = _host(source.address)
            if not host:
                raise ConfigurationError(
                    "source: expected folder:DIR, folder:DIR/{id}.jpg, https://HOST/{id}, "
                    f"texts:FILE.jsonl, column:NAME or function:NAME, got {source.address[:80]!r}"
                )
            if host not in self._hosts:
                raise ConfigurationError(
                    f"source: host {host!r} is not among item_hosts of this gateway's settings; "
                    "its operator names it there (gateway serve --item-host HOST)"
                )
            return UrlItems(source.address, self._hosts, kind)
        folder, pattern = _split(source.address.removeprefix(FOLDER))
        found = self._below(folder)
        if not found.is_dir():
            raise NotFoundError(f"source: expected a folder of {kind}s at {folder}, found none")
        return FolderItems(found, pattern, kind)

    def _below(self, path: Path) -> Path:
        """Raises ConfigurationError for a path that the operator has not named a folder above."""
        found = path.resolve()
        if not any(found.is_relative_to(place) for place in self._folders):
            raise ConfigurationError(
                f"source: {path} is below none of item_folders of this gateway's settings; its "
                "operator names it there (gateway serve --item-folder DIR)"
            )
        return found


def _named(name: str, there: Collection[str], setting: str) -> str:
    """A name that the operator gave. Raises ConfigurationError."""
    if name not in there:
        raise ConfigurationError(
            f"source: {name[:80]!r} is not among {setting} of this gateway's settings; its "
            "operator names it there (gateway serve --settings FILE)"
        )
    return name


def _column(address: str) -> Items:
    from nobackfill.server.stores.postgresql.column_items import DatabaseColumnItems

    return DatabaseColumnItems(address)


def _function(name: str) -> Callable[[str], str | bytes | None]:
    """Import module:function, as the operator's settings name it. Raises ConfigurationError,
    whatever the module raises."""
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise ConfigurationError(
            f"item_functions: {name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    if not callable(found):
        raise ConfigurationError(f"item_functions: {name} is no function")
    function: Callable[[str], str | bytes | None] = found
    return function


def _host(address: str) -> str | None:
    try:
        return urllib3.util.parse_url(address).host
    except urllib3.exceptions.LocationParseError:
        return None


def _split(text: str) -> tuple[Path, str]:
    """A folder, and what is below it with {id} in it."""
    parts = PurePosixPath(text).parts
    first = next((i for i, part in enumerate(parts) if "{id}" in part), len(parts))
    return Path(*parts[:first]), "/".join(parts[first:]) or "{id}"
