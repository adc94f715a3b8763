"""Names that users rely on, read from the code: `python -m tests.inventory` writes
tests/inventory.json.
Names in it change only together with a table of old and new names in the commit that changes them.
Help texts and sentences are left out: they may be rewritten at any time.
"""

import json
import re
import tempfile
from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from prometheus_client import generate_latest
from pydantic import SecretStr
from pydantic_core import PydanticUndefined

from manual.commands import COMMANDS, application
from nobackfill import errors
from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.canary.series import CanarySeries
from nobackfill.server.galleries.sizes import IndexSizes
from nobackfill.server.grpc.loop import Interceptor
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.healing.series import HealingSeries
from nobackfill.server.settings import Settings
from nobackfill.server.state import StateFile

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
# Programs that users install or are told to run; the benchmarks are the developers' own.
PROGRAMS = [name for name in COMMANDS if not name.startswith("python -m bench")]


def read() -> dict[str, Any]:
    """Everything, as JSON values with sorted keys."""
    protos = _protos()
    return {
        "commands": {name: _command(application(name)) for name in PROGRAMS},
        "settings": _settings(),
        "services": protos["services"],
        "messages": protos["messages"],
        "enums": protos["enums"],
        "metrics": {k: v for k, v in series().items() if not k.endswith("_created")},
        "exit_codes": _exit_codes(),
    }


def _command(command: Any) -> dict[str, Any]:
    """Options and arguments of a command by name, and its subcommands."""
    parameters = {
        (max(p.opts, key=len) if p.param_type_name == "option" else p.human_readable_name): {
            "names": sorted([*p.opts, *p.secondary_opts]),
            "default": _plain(p.default),
            **({"choices": list(p.type.choices)} if hasattr(p.type, "choices") else {}),
            **({"required": True} if p.required else {}),
            **({"repeated": True} if p.multiple or p.nargs != 1 else {}),
        }
        for p in command.params
    }
    subcommands = getattr(command, "commands", {})
    described = {"parameters": dict(sorted(parameters.items()))}
    if subcommands:
        described["commands"] = {name: _command(sub) for name, sub in sorted(subcommands.items())}
    return described


def _plain(value: object) -> Any:
    if callable(value):
        return "computed"
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, SecretStr):
        return "secret"
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _settings() -> dict[str, Any]:
    return {
        name: {
            "type": str(field.annotation).replace("typing.", ""),
            "default": "computed" if field.default is PydanticUndefined else _plain(field.default),
        }
        for name, field in sorted(Settings.model_fields.items())
    }


def _protos() -> dict[str, dict[str, Any]]:
    services: dict[str, Any] = {}
    messages: dict[str, Any] = {}
    enums: dict[str, Any] = {}

    def add(message: Any) -> None:
        messages[message.full_name] = {
            field.name: [field.number, _type_of(field), "repeated" * field.is_repeated]
            for field in message.fields
        }
        for nested in message.nested_types:
            add(nested)
        for enum in message.enum_types:
            enums[enum.full_name] = {value.name: value.number for value in enum.values}

    for path in sorted((ROOT / "protos" / "nobackfill" / "v1").glob("*.proto")):
        file = import_module(f"nobackfill.v1.{path.stem}_pb2").DESCRIPTOR
        for service in file.services_by_name.values():
            services[service.full_name] = {
                method.name: [
                    method.input_type.full_name, "stream" * method.client_streaming,
                    method.output_type.full_name, "stream" * method.server_streaming,
                ]
                for method in service.methods
            }  # fmt: skip
        for message in file.message_types_by_name.values():
            add(message)
        for enum in file.enum_types_by_name.values():
            enums[enum.full_name] = {value.name: value.number for value in enum.values}
    return {"services": services, "messages": messages, "enums": enums}


def _type_of(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return str(field.message_type.full_name)
    if field.enum_type is not None:
        return str(field.enum_type.full_name)
    kinds: Mapping[int, str] = {
        number: name.removeprefix("TYPE_").lower()
        for name, number in vars(FieldDescriptor).items()
        if name.startswith("TYPE_")
    }
    return kinds[field.type]


def series() -> dict[str, str]:
    """Names and kinds of the series of a gateway, as Prometheus reads them."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Metrics()
        canaries = Canaries(StateFile(Path(folder, "state.json")), metrics)
        metrics.registry.register(CanarySeries(canaries))
        metrics.registry.register(HealingSeries(list))
        metrics.registry.register(IndexSizes(list))
        Interceptor(metrics, None, 8, max_call_seconds=60)
        text = generate_latest(metrics.registry).decode()
        canaries.close()
    return dict(sorted(re.findall(r"^# TYPE (\w+) (\w+)", text, re.MULTILINE)))


def _exit_codes() -> dict[str, int]:
    return {
        name: one.exit_code
        for name, one in sorted(vars(errors).items())
        if isinstance(one, type) and issubclass(one, errors.NobackfillError)
    }


def text() -> str:
    """The file's content."""
    return json.dumps(read(), indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
