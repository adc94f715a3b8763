"""Names that users rely on, read from the code: `python -m tests.inventory` writes
tests/inventory.json.
Names in it change only together with a table of old and new names in the commit that changes them.
Help texts and sentences are left out: they may be rewritten at any time.

SQL names are those of real objects that the code makes. Where PostgreSQL cannot start, the file
keeps what it has of it.
"""

import ast
import functools
import inspect
import json
import re
import sqlite3
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, cast, get_args

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from prometheus_client import generate_latest
from pydantic import BaseModel, SecretStr
from pydantic_core import PydanticUndefined

from manual.commands import COMMANDS, Command, application
from nobackfill import errors
from nobackfill.server.canary.canaries import Canaries, CanaryMetrics
from nobackfill.server.galleries.indexing import IndexMetrics
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.grpc.rpc import Interceptor
from nobackfill.server.healing.healing import HealingSeries
from nobackfill.server.settings import Settings
from nobackfill.server.state import StateFile

if TYPE_CHECKING:
    from tests.support.postgres import Server

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".json")
# Programs that users install or are told to run; the benchmarks are the developers' own.
_KEY = re.compile(r"[\w{}]+")
PROGRAMS = [name for name in COMMANDS if not name.startswith("python -m bench")]
# Where the keys of a command's --json are written: dataclasses, named tuples, models of pydantic,
# messages of the contract, and functions whose dictionaries have them.
_APP, _CLIENT = "nobackfill.adopt", "nobackfill.client"
_PUBLISHING, _SERVER = "nobackfill.release.publishing", "nobackfill.server"
_TRAINING, _V1 = "nobackfill.training", "nobackfill.v1"
_FIT = (
    f"{_APP}.fitting:fit_and_judge",
    f"{_APP}.verdict:Verdict",
    f"{_APP}.verdict:VerdictOption",
    f"{_APP}.verdict:CurvePoint",
)
JSON: Mapping[str, tuple[str, ...]] = {
    "edge-client add": (f"{_CLIENT}.cli.galleries:add", f"{_CLIENT}.cli.galleries:add_texts"),
    "edge-client browse": (f"{_CLIENT}.cli.galleries:browse",),
    "edge-client gc": (f"{_CLIENT}.maintenance:collect_garbage",),
    "edge-client init": (f"{_CLIENT}.creation:init",),
    "edge-client list": (f"{_CLIENT}.cli.galleries:list_items",),
    "edge-client pull": (f"{_CLIENT}.vault.transfer:PullReport.as_json",),
    "edge-client push": (f"{_CLIENT}.vault.transfer:PushReport.as_json",),
    "edge-client remove": (f"{_CLIENT}.maintenance:remove",),
    "edge-client report": (
        f"{_CLIENT}.sync:record_sync",
        f"{_CLIENT}.cli.releases:send_sync_report",
    ),
    "edge-client rescue": (f"{_CLIENT}.maintenance:rescue",),
    "edge-client rollback": (f"{_CLIENT}.cli.releases:rollback",),
    "edge-client search": (
        f"{_CLIENT}.cli.galleries:search",
        f"{_CLIENT}.search:DeviceAnswer.as_json",
        f"{_CLIENT}.search:DeviceHit.as_json",
    ),
    "edge-client set": (f"{_CLIENT}.cli.galleries:set_metadata",),
    "edge-client status": (f"{_CLIENT}.status:status", f"{_CLIENT}.status:_space"),
    "edge-client sync": (f"{_CLIENT}.sync:SyncReport",),
    "edge-client verify": (f"{_CLIENT}.maintenance:verify",),
    "gateway activate": (f"{_V1}.release_pb2:ActivateReleaseResponse",),
    "gateway audit": (f"{_SERVER}.cli.data:audit", f"{_SERVER}.state:AuditEntry"),
    "gateway data backup": (f"{_SERVER}.backup:DataSummary",),
    "gateway canary promote": (f"{_V1}.release_pb2:ActivateReleaseResponse",),
    "gateway canary start": (f"{_V1}.release_pb2:ActivateReleaseResponse",),
    "gateway canary step": (f"{_V1}.release_pb2:ActivateReleaseResponse",),
    "gateway canary stop": (f"{_V1}.release_pb2:RollbackReleaseResponse",),
    "gateway canary watch": (f"{_V1}.release_pb2:WatchCanaryResponse",),
    "gateway estimate": (f"{_V1}.upgrade_pb2:EstimateUpgradeResponse",),
    "gateway data export": (f"{_SERVER}.cli.data:export",),
    "gateway gallery create": (f"{_V1}.gallery_pb2:Gallery",),
    "gateway gallery delete": (f"{_SERVER}.cli.galleries:delete",),
    "gateway gallery list": (f"{_V1}.gallery_pb2:ListGalleriesResponse",),
    "gateway install-triton": (f"{_SERVER}.cli.serve:install_triton",),
    "gateway data migrate": (f"{_SERVER}.cli.data:migrate",),
    "gateway data move": (f"{_SERVER}.cli.data:move", f"{_SERVER}.transfer:TransferReport.to_json"),
    "gateway put": (f"{_SERVER}.cli.galleries:put",),
    "gateway releases": (
        f"{_V1}.release_pb2:ListReleasesResponse",
        "nobackfill.release.manifest:Manifest",
    ),
    "gateway data restore": (f"{_SERVER}.backup:DataSummary",),
    "gateway retire": (f"{_V1}.release_pb2:RetireReleaseResponse",),
    "gateway rollback": (f"{_V1}.release_pb2:RollbackReleaseResponse",),
    "gateway sample": (f"{_SERVER}.cli.serve:sample",),
    "gateway search": (f"{_SERVER}.cli.galleries:search",),
    "gateway status": (
        f"{_V1}.gallery_pb2:ListGalleriesResponse",
        f"{_SERVER}.cli.operations:status",
    ),
    "gateway update-gallery": (f"{_V1}.gallery_pb2:Gallery",),
    "gateway upgrade": (f"{_SERVER}.cli.upgrade:upgrade",),
    "gateway data verify": (f"{_SERVER}.backup:DataSummary",),
    "gateway watch": (f"{_V1}.upgrade_pb2:UpgradeProgress",),
    "nobackfill carry": (f"{_APP}.cli:carry", f"{_APP}.cli:_carry_and_answer"),
    "nobackfill migrate status": (f"{_APP}.cli:status",),
    **dict.fromkeys(
        ("nobackfill converter improve", "nobackfill converter publish", "nobackfill fit"), _FIT
    ),
    "nobackfill converter withdraw": (f"{_APP}.cli:withdraw",),
    "nobackfill inspect": (f"{_APP}.pairs:Inspection",),
    "publication keys": (f"{_PUBLISHING}.cli:keys",),
    "publication list": (
        f"{_PUBLISHING}.cli:list_command",
        f"{_PUBLISHING}.inspection:PublicationEntry",
    ),
    "publication resign": (f"{_PUBLISHING}.cli:_print_renewal",),
    "publication rollout": (f"{_PUBLISHING}.cli:rollout",),
    "publication rotate": (f"{_PUBLISHING}.cli:_print_renewal",),
    "publication verify": (f"{_PUBLISHING}.cli:verify",),
    "publication withdraw": (f"{_PUBLISHING}.cli:withdraw",),
    "python training/evaluate.py": (
        f"{_TRAINING}.cli.evaluate:main",
        f"{_TRAINING}.cli.evaluate:_report",
        f"{_TRAINING}.cli.evaluate:_protocol_report",
        f"{_TRAINING}.cli.evaluate:_figures",
        "nobackfill.quality.retrieval:evaluate_cells",
        "nobackfill.quality.retrieval:_recognition",
        "nobackfill.quality.criterion:_judge",
        "nobackfill.quality.criterion:_strict",
    ),
    "python training/export.py": (
        f"{_TRAINING}.cli.export:_report",
        "nobackfill.release.manifest:GateVerdict",
        "nobackfill.release.manifest:Cell",
        "nobackfill.release.manifest:UnlabelledCell",
        "nobackfill.release.manifest:RouteEvidence",
    ),
}
# Keys of files that users keep or write, by the same kinds of sources.
FILES: Mapping[str, tuple[str, ...]] = {
    "a backup's listing": (f"{_SERVER}.backup:_Listing",),
    "a converter": ("nobackfill.release.manifest:Converter",),
    "a declaration beside an ONNX file": (f"{_PUBLISHING}.declaration:Declaration",),
    "a release's manifest": ("nobackfill.release.manifest:Manifest",),
    "a training's configuration": (f"{_TRAINING}.config:Config",),
    "audit.jsonl": (f"{_SERVER}.state:AuditEntry",),
    "state.json": (f"{_SERVER}.state:State",),
    "the file of converter publish --card": (f"{_APP}.converters:ConverterCard",),
    "the file of gateway serve --settings": (f"{_SERVER}.settings:Settings",),
}


def read() -> dict[str, Any]:
    """Everything but what PostgreSQL has, as JSON values with sorted keys."""
    protos = _protos()
    return {
        "json": {name: _keys(sources) for name, sources in JSON.items()},
        "files": {name: _keys(sources) for name, sources in FILES.items()},
        "gallery_state": _gallery_state(),
        "sqlite": _sqlite(),
        "proto_defaults": proto_defaults(),
        "commands": {name: _command(application(name)) for name in PROGRAMS},
        "settings": _settings(),
        "services": protos["services"],
        "messages": protos["messages"],
        "enums": protos["enums"],
        "metrics": {k: v for k, v in series().items() if not k.endswith("_created")},
        "exit_codes": _exit_codes(),
    }


def _command(command: Command) -> dict[str, Any]:
    """Options and arguments of a command by name, and its subcommands."""
    parameters = {
        p.name: {
            "names": sorted([*p.opts, *p.secondary_opts]),
            "default": _plain(p.default),
            **({"choices": list(p.choices)} if p.choices is not None else {}),
            **({"required": True} if p.required else {}),
            **({"repeated": True} if p.repeated else {}),
        }
        for p in command.params
    }
    described: dict[str, Any] = {"parameters": dict(sorted(parameters.items()))}
    if command.commands:
        described["commands"] = {
            name: _command(sub) for name, sub in sorted(command.commands.items())
        }
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
        metrics.registry.register(CanaryMetrics(canaries))
        metrics.registry.register(HealingSeries(list))
        metrics.registry.register(IndexMetrics(list))
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


def _keys(sources: tuple[str, ...]) -> list[str]:
    return sorted({key for source in sources for key in _keys_of(_named(source))})


def _named(source: str) -> Any:
    """What MODULE:NAME or MODULE:CLASS.NAME is."""
    module, _, names = source.partition(":")
    return functools.reduce(getattr, names.split("."), import_module(module))


def _keys_of(source: Any) -> Iterator[str]:
    if isinstance(source, UnionType):
        for one in get_args(source):
            yield from _keys_of(one)
    elif not isinstance(source, type):
        yield from _keys_in(source)
    elif issubclass(source, Message):
        yield f"fields of {source.DESCRIPTOR.full_name}"
    elif issubclass(source, BaseModel):
        schema = source.model_json_schema()
        for model in (schema, *schema.get("$defs", {}).values()):
            yield from model.get("properties", {})
    elif is_dataclass(source):
        yield from (field.name for field in fields(source))
    else:
        yield from cast(Any, source)._fields


def _keys_in(function: Any) -> Iterator[str]:
    """Keys of the dictionaries that a function writes, but of what it gives to another file."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    others = [call.args[0] for call in _calls(tree, "update_state", "load_settings")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict) and node not in others:
            yield from filter(_KEY.fullmatch, map(_word, node.keys))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            yield from filter(_KEY.fullmatch, [_word(node.slice)])


def _word(node: ast.expr | None) -> str:
    """A text that is written out, with braces for what is filled in; empty for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_word(part) or "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _calls(tree: ast.AST, *names: str) -> Iterator[ast.Call]:
    """Calls of functions and methods of these names that have an argument."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args:
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            if isinstance(node.func, ast.Name):
                name = node.func.id
            if name in names:
                yield node


def _gallery_state() -> list[str]:
    """Keys of the small values that are kept in a gallery, as far as the code writes them out."""
    found = set()
    for root in ("core", "serving", "adopt", "client", "server", "plugins"):
        for path in sorted((ROOT / root).rglob("*.py")):
            content = path.read_text(encoding="utf-8")
            if "update_state(" in content or ".state(" in content:
                for call in _calls(ast.parse(content), "update_state", "state"):
                    value = call.args[0]
                    keys = value.keys if isinstance(value, ast.Dict) else [value]
                    found |= set(filter(_KEY.fullmatch, map(_word, keys)))
    return sorted(found)


def _sqlite() -> dict[str, Any]:
    """Tables, columns, indexes and triggers of the files that the code makes."""
    from nobackfill.client.vault import queue
    from nobackfill.gallery.sqlite_gallery import SqliteGallery
    from nobackfill.server.healing.ledger import FileLedger
    from nobackfill.serving.natives import NativeVectorFile
    from tests.gallery.making import spec

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with closing(SqliteGallery.create(folder / "gallery", spec())) as store:
            store.add_staging_space(spec(2))
            with store.transaction() as connection:
                queue._prepare(connection)
            FileLedger(folder, store, spec().space).close()
        (ledger,) = (path for path in folder.iterdir() if path.name.endswith(".sqlite"))
        NativeVectorFile(folder / "natives", "fingerprint", 4).close()
        return {
            "a gallery": _sqlite_names(folder / "gallery"),
            ledger.name: _sqlite_names(ledger),
            "the file of Natives": _sqlite_names(folder / "natives"),
        }


def _sqlite_names(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        objects = connection.execute(
            "SELECT type, name, tbl_name FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'"
        ).fetchall()
        found: dict[str, Any] = {}
        for kind, name, table in objects:
            if kind == "table":
                columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
                found[f"table {name}"] = {column: type_ for _, column, type_, *_ in columns}
            else:
                found[f"{kind} {name}"] = table
    return found


def proto_defaults() -> dict[str, Any]:
    """What the gateway takes where a number of a request is 0, which proto3 cannot tell from
    absent."""
    from nobackfill.server.galleries.answering import DEFAULT_K
    from nobackfill.server.grpc.services.gallery import DEFAULT_PAGE_SIZE
    from nobackfill.server.healing.registration import _NUMBERS
    from nobackfill.server.state import Canary
    from nobackfill.server.upgrades.upgrading import DEFAULT_SPARE_CORES

    usual = {name: number for name, (_, _, number) in _NUMBERS.items()}
    canary = Canary(share=1)
    return {
        "ActivateReleaseRequest.spare_cores": DEFAULT_SPARE_CORES,
        "Canary.largest_p99_ratio": canary.largest_p99_ratio,
        "Canary.most_errors": canary.most_errors,
        "EstimateUpgradeRequest.spare_cores": DEFAULT_SPARE_CORES,
        "ItemSource.bytes_a_query": usual["bytes_a_query"],
        "ItemSource.concurrency": usual["concurrency"],
        "ItemSource.hits": usual["hits"],
        "ItemSource.items_a_day": usual["a_day"],
        "ItemSource.patience": usual["seconds"],
        "ListItemsRequest.page_size": DEFAULT_PAGE_SIZE,
        "SearchRequest.k": DEFAULT_K,
        "StartUpgradeRequest.spare_cores": DEFAULT_SPARE_CORES,
    }


def read_postgresql(server: "Server") -> dict[str, Any]:
    """Tables, columns, indexes, functions and triggers that the code makes in databases: those of
    gateways, and those that `nobackfill carry` puts beside a user's table."""
    from nobackfill.adopt.carrying import carry
    from nobackfill.adopt.sources.opening import open_source
    from nobackfill.adopt.sources.source import Target
    from nobackfill.plugins.milvus import journal
    from nobackfill.server.stores.postgresql import schema
    from nobackfill.server.stores.postgresql.database import Database
    from nobackfill.server.stores.postgresql.gallery import PostgresqlGalleries
    from nobackfill.server.stores.postgresql.ledger import DatabaseLedger
    from tests.adopt.table_beside import MADE, MAP, put
    from tests.gallery.making import spec

    found = {}
    with server.database() as url, closing(Database(url, most_connections=2)) as database:
        database.open(schema.prepare)
        gallery = PostgresqlGalleries(database).create("g", [spec()], {})
        DatabaseLedger(gallery, spec().space)
        gallery.add_staging_space(spec(2))
        found["gateways"] = _postgresql_names(server, url)
        database.write(lambda connection: journal.begin_journal(connection, gallery.schema))
        found["gateways with Milvus"] = {
            name: columns
            for name, columns in _postgresql_names(server, url).items()
            if name not in found["gateways"]
        }
    for to, flip in (("vector_new", False), ("vector_new", True), ("table:beside", False)):
        with server.connected() as (url, connection):
            connection.execute("CREATE EXTENSION vector")
            connection.execute("CREATE TABLE t (id int PRIMARY KEY, v vector(24), body text)")
            put(connection, range(50), MADE.old[:50])
            before = _postgresql_names(server, url)
            target = Target(to, MAP.dims[1], MAP.digest)
            carry(open_source(f"{url}#t"), target, MAP, rows_per_window=50, flip=flip)
            after = _postgresql_names(server, url)
            name = f"carry --to {to}{' --flip' * flip}"
            found[name] = {k: v for k, v in after.items() if before.get(k) != v}
    return found


def _postgresql_names(server: "Server", url: str) -> dict[str, Any]:
    import psycopg

    ours = """n.nspname !~ '^(pg_|information_schema)' AND NOT EXISTS (
        SELECT FROM pg_depend d WHERE d.objid = {}.oid AND d.deptype = 'e')"""
    found: dict[str, Any] = {}
    with psycopg.connect(url) as connection:
        for query in (
            "SELECT 'table ' || n.nspname || '.' || c.relname, jsonb_object_agg(a.attname,"
            " format_type(a.atttypid, a.atttypmod)) FROM pg_class c JOIN pg_namespace n"
            " ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
            f" AND NOT a.attisdropped WHERE c.relkind IN ('r', 'p', 'v') AND {ours.format('c')}"
            " GROUP BY 1",
            "SELECT 'index ' || n.nspname || '.' || c.relname, i.indrelid::regclass::text"
            " FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" JOIN pg_index i ON i.indexrelid = c.oid WHERE {ours.format('c')}",
            "SELECT 'function ' || n.nspname || '.' || p.proname,"
            " pg_get_function_identity_arguments(p.oid) FROM pg_proc p"
            f" JOIN pg_namespace n ON n.oid = p.pronamespace WHERE {ours.format('p')}",
            "SELECT 'trigger ' || t.tgname, t.tgrelid::regclass::text FROM pg_trigger t"
            " JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE NOT t.tgisinternal AND {ours.format('c')}",
        ):
            found |= dict(connection.execute(query.encode()).fetchall())
    return found


def text(postgresql: Mapping[str, Any]) -> str:
    """The file's content."""
    return json.dumps(read() | {"postgresql": postgresql}, indent=1, sort_keys=True) + "\n"


def written() -> dict[str, Any]:
    """What the file has."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def _write() -> None:
    from nobackfill.errors import NobackfillError
    from tests.support.postgres import running

    try:
        with running() as server:
            postgresql = read_postgresql(server)
    except NobackfillError as error:
        print(f"what PostgreSQL has is left as it was: {error}", file=sys.stderr)
        postgresql = written().get("postgresql", {})
    FILE.write_text(text(postgresql), encoding="utf-8")


if __name__ == "__main__":
    _write()
