"""Reading a configuration: one YAML file or its values, unknown keys refused with the known ones.

What is wrong raises ConfigurationError (exit 78) with one line a wrong key.
"""

from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import Config, EmbedderConfig, SideEncoderConfig, UpgradeConfig

_ADAPTER: TypeAdapter[Config] = TypeAdapter(Annotated[Config, Field(discriminator="kind")])
_KINDS: dict[str, type[BaseModel]] = {
    "embedder": EmbedderConfig,
    "side_encoder": SideEncoderConfig,
    "upgrade": UpgradeConfig,
}


def configs() -> Path:
    """The folder of ready configurations: configs/ of a checkout, a copy of it in a wheel."""
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parents[2] / "configs"


# What PyYAML raises: it makes dates and numbers as Python does, whatever they are.
_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: YAML's own would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        twice = [key for key, times in keys.items() if times > 1 and key != "<<"]
        if twice:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]!r} is there twice", node.start_mark
            )
        return super().construct_mapping(node, deep)


def _yaml(text: str) -> object:
    return yaml.load(text, _Loader)  # noqa: S506 - it is a SafeLoader


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Read a YAML file; each override is `key=value`, value in YAML, nested keys with dots.

    Raises ConfigurationError where there is no such file, and for everything wrong inside.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ConfigurationError(f"no configuration {path}; configs/ holds ready ones") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read as YAML text ({error})") from error
    try:
        values = _yaml(text)
    except _NOT_YAML as error:
        raise ConfigurationError(f"{path}: not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: expected keys with values, got {type(values).__name__}")
    for override in overrides:
        _set(values, override)
    return parse_config(values, str(path))


def parse_config(values: dict[str, object], source: str) -> Config:
    """Check `values`. Raises ConfigurationError, one line a problem, naming the known keys."""
    kind = values.get("kind")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ConfigurationError(f"{source}: expected kind: {' | '.join(_KINDS)}, got {kind!r}")
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            where = ".".join(str(part) for part in problem["loc"][1:])
            if problem["type"] == "extra_forbidden":
                known = ", ".join(_known_keys(_KINDS[str(kind)], problem["loc"][1:-1]))
                lines.append(f"unknown key {where!r}; known: {known}")
            else:
                lines.append(f"{where}: {problem['msg']}" if where else problem["msg"])
        raise ConfigurationError(f"{source}: " + "; ".join(lines)) from error


def _known_keys(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    for parent in parents:
        field = model.model_fields.get(str(parent))
        inner = None if field is None else field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            model = inner
    return sorted(model.model_fields)


def _set(values: dict[str, object], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigurationError(f"--set expects key=value, got {override!r}")
    *parents, last = key.split(".")
    for parent in parents:
        inner = values.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"--set {override}: {parent!r} holds no keys")
        values = inner
    try:
        values[last] = _yaml(text)
    except _NOT_YAML as error:
        raise ConfigurationError(f"--set {override}: the value is not YAML ({error})") from error
