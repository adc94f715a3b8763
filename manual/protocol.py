"""The reference of the contract: every service, message and enum with its comments."""

import importlib.resources
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc

ROOT = Path(__file__).parents[1] / "protos"
# Numbers of fields in FileDescriptorProto, DescriptorProto, EnumDescriptorProto and
# ServiceDescriptorProto: what the paths of comments are made of.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _VALUES, _METHODS = 2, 3, 4, 2, 2
_TYPES = {
    value: name.removeprefix("TYPE_").lower()
    for name, value in pb.FieldDescriptorProto.Type.items()
}
_REPEATED = pb.FieldDescriptorProto.LABEL_REPEATED


def page() -> str:
    """The page, in Markdown. Raises SystemExit when protoc refuses a file."""
    lines = ["# Protocol", "", "Package `nobackfill.v1`; generated from `protos/`.", ""]
    found = files()
    calls = _calls(found)
    for file in found:
        lines += _File(file, calls).lines()
    return "\n".join(lines)


def _calls(found: Sequence[pb.FileDescriptorProto]) -> dict[str, str]:
    """What a message without a comment is: the request or the answer of its call."""
    told = {}
    for file in found:
        for service in file.service:
            for call in service.method:
                of = f"[{service.name}](#{service.name.lower()}).{call.name}"
                told[call.input_type] = f"What {of} is asked with."
                told[call.output_type] = f"What {of} answers."
    return {name.rpartition(".")[2]: text for name, text in told.items()}


def files() -> list[pb.FileDescriptorProto]:
    """Our .proto files, with their comments."""
    sources = sorted(str(path) for path in ROOT.rglob("*.proto"))
    wellknown = str(importlib.resources.files("grpc_tools") / "_proto")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        words = [f"-I{ROOT}", f"-I{wellknown}", "--include_source_info"]
        if protoc.main(["protoc", *words, f"--descriptor_set_out={out}", *sources]) != 0:
            raise SystemExit(1)
        return list(pb.FileDescriptorSet.FromString(out.read_bytes()).file)


class _File:
    def __init__(self, file: pb.FileDescriptorProto, calls: Mapping[str, str]) -> None:
        self._file = file
        self._calls = calls
        self._comments = {
            tuple(place.path): " ".join((place.leading_comments or place.trailing_comments).split())
            for place in file.source_code_info.location
        }

    def lines(self) -> Iterator[str]:
        name = Path(self._file.name).name
        yield from (f"## {name}", "", self._said(()) or self._said((2,)), "")
        for n, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICES, n))
        for n, message in enumerate(self._file.message_type):
            yield from self._message(message, (_MESSAGES, n), message.name)
        for n, enum in enumerate(self._file.enum_type):
            yield from self._enum(enum, (_ENUMS, n), enum.name)

    def _service(self, service: pb.ServiceDescriptorProto, path: Sequence[int]) -> Iterator[str]:
        yield from (f"### {service.name}", "", self._said(path), "")
        yield from ("| call | request | answer | |", "|---|---|---|---|")
        for n, call in enumerate(service.method):
            asked = _streams(call.client_streaming) + _link(call.input_type)
            told = _streams(call.server_streaming) + _link(call.output_type)
            yield f"| `{call.name}` | {asked} | {told} | {self._said((*path, _METHODS, n))} |"
        yield ""

    def _message(
        self, message: pb.DescriptorProto, path: Sequence[int], name: str
    ) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from (f"### {name}", "", self._said(path) or self._calls.get(name, ""), "")
        if message.field:
            yield from ("| field | type | |", "|---|---|---|")
        for n, field in enumerate(message.field):
            said = self._said((*path, _FIELDS, n))
            if field.HasField("oneof_index") and not field.proto3_optional:
                said = f"*one of {message.oneof_decl[field.oneof_index].name}* {said}"
            yield f"| `{field.name}` = {field.number} | {_type(field, message)} | {said} |"
        yield ""
        for n, nested in enumerate(message.nested_type):
            yield from self._message(nested, (*path, _NESTED, n), f"{name}.{nested.name}")
        for n, enum in enumerate(message.enum_type):
            yield from self._enum(enum, (*path, _NESTED_ENUMS, n), f"{name}.{enum.name}")

    def _enum(self, enum: pb.EnumDescriptorProto, path: Sequence[int], name: str) -> Iterator[str]:
        yield from (f"### {name}", "", self._said(path), "", "| value | |", "|---|---|")
        for n, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {self._said((*path, _VALUES, n))} |"
        yield ""

    def _said(self, path: Sequence[int]) -> str:
        # A bar would end the table's cell.
        return self._comments.get(tuple(path), "").replace("|", "\\|").replace("<", "&lt;")


def _type(field: pb.FieldDescriptorProto, message: pb.DescriptorProto) -> str:
    entries = {entry.name: entry for entry in message.nested_type if entry.options.map_entry}
    short = field.type_name.rpartition(".")[2]
    if short in entries:
        key, value = entries[short].field
        return f"map of {_TYPES[key.type]} to {_type(value, message)}"
    name = _link(field.type_name) if field.type_name else f"`{_TYPES[field.type]}`"
    if field.label == _REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    """A message or an enum: to its heading where it is ours."""
    ours = type_name.removeprefix(".nobackfill.v1.")
    if ours == type_name:
        return f"`{type_name.lstrip('.')}`"
    anchor: Any = re.sub(r"[^a-z0-9_-]", "", ours.lower())
    return f"[{ours}](#{anchor})"


def _streams(streams: bool) -> str:
    return "stream of " if streams else ""
