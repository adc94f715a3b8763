"""Read which modules of sentence-transformers make the vectors of documents, and which of queries.

`modules.json` lists them in order. A Router (Asym before version 5) holds several lists, its
routes, and takes one by the task, as `encode_document()` and `encode_query()` set it.
"""

from ast import literal_eval
from codecs import BOM_UTF8
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, NamedTuple, TypeVar

from pydantic import BaseModel, Field, RootModel, ValidationError

from nobackfill.errors import InvalidInputError
from nobackfill.release.manifest import TextRole, join_validation_problems

MODULES = "modules.json"
_LIBRARY = "sentence_transformers."
_ROUTERS = ("Router", "Asym")
# The Router's own file, and its name before version 5.
_ROUTER_FILES = ("router_config.json", "config.json")
_TEXT = "text"

_Model = TypeVar("_Model", bound=BaseModel)


def parse_model_file(file: Path, kind: type[_Model]) -> _Model:
    """Parse a JSON file about a model.

    Args:
        file: The file, in UTF-8; a byte order mark is skipped.
        kind: The class of its content.

    Raises:
        InvalidInputError: It cannot be read, or has unexpected content; the message names it.
    """
    try:
        return kind.model_validate_json(file.read_bytes().removeprefix(BOM_UTF8))
    except OSError as error:
        raise InvalidInputError(
            f"{file}: this file about the model cannot be read ({error.strerror}); check its "
            "permissions"
        ) from error
    except ValidationError as error:
        raise InvalidInputError(
            f"{file}: this file about the model has unexpected content "
            f"({join_validation_problems(error)}); "
            "download the model again, or save it again with its own library"
        ) from error


class SentenceModule(NamedTuple):
    """A module of a model.

    Attributes:
        path: Its folder, relative to the model's; "" for the model's own folder.
        type: The dotted name of its class.
    """

    path: str
    type: str

    @property
    def kind(self) -> str:
        """Return the name of its class."""
        return self.type.rpartition(".")[2]

    @property
    def is_of_library(self) -> bool:
        """Return whether its class is the library's, not code that came with the model."""
        return self.type.startswith(_LIBRARY)


class _Module(BaseModel):
    path: str
    type: str


class _Modules(RootModel[Annotated[list[_Module], Field(min_length=1)]]):
    """The content of modules.json."""


class _Routing(BaseModel):
    """How a Router chooses; a key of `route_mappings` is "('query', 'text')" with None for any."""

    route_mappings: dict[str, str] | None = None


class _RouterConfig(BaseModel):
    """A Router's own file: classes of modules by their names, names of modules by route."""

    types: dict[str, str]
    structure: dict[str, list[str]]
    parameters: _Routing = _Routing()


def read_modules(folder: Path, role: TextRole) -> list[SentenceModule]:
    """List the modules that a text of a role passes, in order, with each Router's route in place.

    Args:
        folder: The model's folder, with modules.json.
        role: The role of the texts; it decides the route, by the library's own rule.

    Returns:
        The modules; empty where modules.json lists only a Router whose route is empty.

    Raises:
        InvalidInputError: A file cannot be read or has unexpected content, a folder leads out of
            the model's, a Router holds a module that is not the library's, or it has no route for
            this role.
    """
    modules: list[SentenceModule] = []
    for one in parse_model_file(folder / MODULES, _Modules).root:
        modules += _expanded(folder, SentenceModule(_below(folder, one.path), one.type), role)
    return modules


def _below(folder: Path, path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts:
        raise InvalidInputError(
            f"{folder}: expected the model's modules in its own folder, got {path!r}; save the "
            "model again with sentence-transformers"
        )
    return "" if str(pure) == "." else str(pure)


def _expanded(folder: Path, module: SentenceModule, role: TextRole) -> list[SentenceModule]:
    if not module.is_of_library or module.kind not in _ROUTERS:
        return [module]
    places = [folder / module.path / name for name in _ROUTER_FILES]
    file = next((place for place in places if place.is_file()), places[0])
    config = parse_model_file(file, _RouterConfig)
    for name, kind in config.types.items():
        if not kind.startswith(_LIBRARY):
            raise InvalidInputError(
                f"{file}: module {name} ({kind}) has code of its own, which is never run here; use "
                "a model whose modules are all of sentence-transformers"
            )
    modules: list[SentenceModule] = []
    for name in config.structure[_route(file, config, role)]:
        if name not in config.types:
            raise InvalidInputError(
                f"{file}: this configuration of a Router lists the module {name} in a route, and "
                "not under `types`; save the model again with sentence-transformers"
            )
        path = PurePosixPath(module.path) / _below(folder, name)
        modules += _expanded(folder, SentenceModule(str(path), config.types[name]), role)
    return modules


def _route(file: Path, config: _RouterConfig, role: TextRole) -> str:
    """Return the route of texts with this task, by the rule of the library's Router."""
    mappings = _mappings(config.parameters.route_mappings or {})
    for key in ((role, _TEXT), (role, None), (None, _TEXT), (None, None)):
        if key in mappings:
            route = mappings[key]
            break
    else:
        # A task without a route has no default: the library raises an error.
        route = role if role in config.structure else _TEXT
    if route not in config.structure:
        routes = sorted(config.structure)
        raise InvalidInputError(
            f"{file}: the model's Router has the routes {', '.join(routes)}, and none for the task "
            f"{role!r}, so that encode_{role}() fails, too; name one in its parameters: "
            f'"route_mappings": {{"(\'{role}\', None)": "{routes[0]}"}}'
        )
    return route


def _mappings(raw: Mapping[str, str]) -> dict[object, str]:
    """Return routes by (task, modality); like the library, leave out keys that are no tuples."""
    mappings: dict[object, str] = {}
    for text, route in raw.items():
        try:
            key = literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(key, tuple) and all(isinstance(one, str | None) for one in key):
            mappings[key] = route
    return mappings
