"""The arrows between the rooms (docs/architecture.md) and the shape of modules, read from the code.

`architecture_exceptions.json` lists what does not pass yet. It only shrinks: an entry that is not
needed any more fails its test.
"""

import ast
import functools
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ("metrics", "release", "gallery", "quality", "wire", "pages", "report")
# The source roots of the namespace package `nobackfill`, and the rooms in each (docs/adr/0038).
ROOTS = {
    "core": CORE,
    "serving": ("serving", "serve"),
    "adopt": ("adopt",),
    "server": ("server",),
    "client": ("client",),
    "training": ("training",),
    "plugins": ("plugins",),
    "research": ("research",),
    "protos": ("v1",),
}
# Modules of the namespace itself: what every room may import, and what they import of each other.
BASE = {
    "errors": set[str](),
    "vectors": {"errors"},
    "ridge": set[str](),
    "terminal": set[str](),
    "version_option": set[str](),
    "framing": set[str](),
    "images": {"errors", "framing"},
    "text": {"errors", "extras"},
    "picture_files": set[str](),
    "class_folders": {"digests", "errors", "framing", "images", "picture_files"},
    "digests": {"errors", "vectors"},
    "extras": {"errors"},
    "faces": set[str](),
    "processes": set[str](),
    "pace": set[str](),
    "loopback": set[str](),
    "onnx_runtime": set[str](),
    "durable": {"errors"},
}
# Rooms that each plug-in may import, beside the base. Research alone imports one: `ray`.
PLUGINS: Mapping[str, set[str]] = {
    "chroma": {"adopt"},
    "integrations": {"wire", "gallery", "v1", "adopt", "serve"},
    "lancedb": {"adopt"},
    "milvus": {"server", "gallery", "adopt"},
    "otel": set(),
    "qdrant": {"adopt"},
    "ray": {"server", "gallery"},
    "sqlite_vec": {"adopt"},
    "web": {"server", "client", "pages", "wire", "gallery", "release", "v1"},
}
# Rooms that each may import, beside the base.
ARROWS = {
    "metrics": set[str](),
    "release": set[str](),
    "gallery": {"release"},
    "wire": {"gallery", "release", "v1"},
    "quality": {"release", "gallery", "metrics"},
    "training": {"quality", "release", "gallery", "metrics"},
    "research": {"training", "quality", "release", "metrics", "plugins"},
    "serving": {"metrics"},
    "server": {"gallery", "release", "metrics", "wire", "serving", "v1"},
    "client": {"gallery", "release", "wire", "v1"},
    "pages": set[str](),
    "report": {"quality", "release", "gallery", "metrics", "pages"},
    "adopt": {"quality", "release", "gallery", "metrics", "wire", "serving"},
    "serve": {"adopt", "serving"},
    "plugins": set[str]().union(*PLUGINS.values()),
}
# The parts of the server, lowest first: each may import those before it.
SERVER = (
    "settings", "process_limits", "state", "stores", "grpc", "catalog", "vault",
    "triton", "embedding", "galleries", "canary", "storage", "transfer", "export",
    "upgrades", "bulk", "healing", "serving", "rollout", "following", "grpc.services",
    "grpc.listener",
    "gateway", "backup", "sample", "cli",
)  # fmt: skip
EXCEPTIONS = json.loads(Path(__file__).with_name("architecture_exceptions.json").read_text("utf-8"))
UNNEEDED = "take out of tests/architecture_exceptions.json what is not needed any more"
# A module with fewer lines that are not blank is to have more than one importer.
SHORT = 80
# Packages that most of the product loads: a module isolates none of them.
USUAL = {"google", "grpc", "numpy", "prometheus_client", "pydantic", "structlog", "typer"}


def folder(room: str) -> Path:
    """Of a room of the package, or of what is never installed: demo, bench, tests."""
    roots = [root for root, rooms in ROOTS.items() if room in rooms]
    return ROOT / roots[0] / "nobackfill" / room if roots else ROOT / room


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in sorted(folder(room).rglob("*.py"))]


def module(path: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[1:] if parts[0] in ROOTS else parts)
    return name.removesuffix(".__init__")


def nodes(path: Path) -> Iterator[ast.AST]:
    """All nodes of a file's syntax tree."""
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


@cache
def imports(path: Path) -> tuple[str, ...]:
    """Dotted names of the modules that a file imports, anywhere in it."""
    return tuple(_imports(path))


def _imports(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole name"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def rooms_of(path: Path) -> set[str]:
    """Rooms of ours that a file imports."""
    names = [name.split(".") for name in imports(path)]
    inside = {name[1] for name in names if name[0] == "nobackfill" and len(name) > 1}
    return inside | {name[0] for name in names if name[0] in ("demo", "bench", "tests")}


@pytest.mark.parametrize("room", ARROWS)
def test_rooms_import_only_what_their_arrows_allow(room: str) -> None:
    assert sources(room)
    for path in sources(room):
        strangers = rooms_of(path) - ARROWS[room] - {room} - set(BASE)
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


@pytest.mark.parametrize("name", BASE)
def test_the_base_imports_nothing_but_the_base(name: str) -> None:
    path = ROOT / "core" / "nobackfill" / f"{name}.py"
    assert rooms_of(path) <= BASE[name], path.relative_to(ROOT)


def test_every_module_of_the_base_is_known() -> None:
    assert {path.stem for path in (ROOT / "core" / "nobackfill").glob("*.py")} == set(BASE)


def plugin_of(name: str) -> str:
    """The plug-in that a module belongs to, "" for one of another room."""
    inside = name.removeprefix("nobackfill.plugins.")
    return "" if inside == name else inside.split(".")[0]


def test_plugins_import_only_what_their_arrows_allow() -> None:
    seen = set()
    for path in sources("plugins"):
        if plugin := plugin_of(module(path)):
            seen.add(plugin)
            strangers = rooms_of(path) - PLUGINS[plugin] - {"plugins"} - set(BASE)
            strangers |= {plugin_of(name) for name in imports(path)} - {"", plugin}
            assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"
    assert seen == set(PLUGINS)


def test_plugins_are_found_through_entry_points_alone() -> None:
    """Others name no module of theirs, not even in a string, and each plug-in is registered.

    Users import `integrations` in the code of their framework.
    """
    for name, path in product().items():
        if not name.startswith(("nobackfill.plugins", "nobackfill.research")):
            assert "nobackfill.plugins" not in path.read_text(encoding="utf-8"), name
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = [one for group in project["entry-points"].values() for one in group.values()]
    registered = {plugin_of(one.partition(":")[0]) for one in found}
    assert registered == set(PLUGINS) - {"integrations"}


def test_the_demo_uses_what_an_app_uses() -> None:
    for path in sources("demo"):
        public = {"adopt", "serve"} if path.parent.name == "adoption" else {"wire", "client", "v1"}
        if path.name == "recipes.py":
            # It measures a step of the very network that it has trained.
            public = {"training"}
        strangers = rooms_of(path) - {"demo", "errors"} - public
        assert not strangers, f"{path.relative_to(ROOT)} imports {sorted(strangers)}"


def test_every_room_has_its_arrows() -> None:
    rooms = {
        path.parent.name for root in ROOTS for path in ROOT.glob(f"{root}/nobackfill/*/__init__.py")
    }
    assert rooms == set(ARROWS) | {"v1"} == {room for rooms in ROOTS.values() for room in rooms}


def test_no_root_hides_the_others() -> None:
    """An `__init__.py` in `nobackfill` of one root, and Python sees no other root (PEP 420)."""
    assert not list(ROOT.glob("*/nobackfill/__init__.py"))
    script = "import nobackfill.client, nobackfill.gallery, nobackfill.server, nobackfill.v1"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT / "docs", check=True)


def test_doors_hold_no_code() -> None:
    """What `python training/train.py` runs is in the package; the door stays at the top."""
    doors = sorted((ROOT / "training").glob("*.py"))
    assert [door.stem for door in doors] == ["compare", "evaluate", "export", "train"]
    assert all(len(door.read_text("utf-8").splitlines()) < 15 for door in doors)


def test_the_parts_of_the_server_import_one_way() -> None:
    def part_of(name: str) -> str:
        inside = name.removeprefix("nobackfill.server.")
        if inside == name:
            return ""
        deeper = ".".join(inside.split(".")[:2])
        return deeper if deeper in SERVER else inside.split(".")[0]

    seen = set()
    for path in sources("server"):
        part = part_of(module(path))
        if not part:
            continue
        seen.add(part)
        wanted = {part_of(name) for name in imports(path)} - {"", part}
        above = wanted - set(SERVER[: SERVER.index(part)])
        assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"
    assert seen == set(SERVER)


def test_commands_are_the_top_of_the_client() -> None:
    below = [path for path in sources("client") if path.parent.name != "cli"]
    assert len(below) > 15
    for path in below:
        above = {name for name in imports(path) if name.startswith("nobackfill.client.cli")}
        assert not above, f"{path.relative_to(ROOT)} imports {sorted(above)}"


def test_only_training_and_research_import_torch() -> None:
    torch_family = {"torch", "torchvision", "lightning_fabric", "pytorch_metric_learning"}
    for path in sources(*(set(ARROWS) - {"training", "research"})):
        assert not packages(path) & torch_family, path.relative_to(ROOT)


def test_only_the_fallback_imports_hnswlib() -> None:
    users = {path for path in sources(*ARROWS) if "hnswlib" in packages(path)}
    assert users == {folder("gallery") / "search" / "package_graph.py"}


def test_hnsw_is_imported_by_server_and_quality_only() -> None:
    for path in sources(*(set(ARROWS) - {"server", "quality"}), "demo"):
        if path.name not in ("hnsw.py", "graph_file.py"):
            names = ("hnsw", "graph_file", "package_graph")
            graphs = {f"nobackfill.gallery.search.{name}" for name in names}
            assert not graphs & set(imports(path)), path.relative_to(ROOT)


def test_only_the_store_and_the_source_in_postgresql_import_psycopg() -> None:
    users = {path for path in sources(*ARROWS) if packages(path) & {"psycopg", "psycopg_pool"}}
    assert {path for path in users if path.parent != folder("adopt") / "sources"} <= set(
        (folder("server") / "stores" / "postgresql").glob("*.py")
    )
    assert {path.name for path in users if path.parent == folder("adopt") / "sources"} == {
        "pgvector.py",
        "pgvector_target.py",
        "postgres_dependents.py",
        "postgres_table.py",
    }


def test_the_edge_client_loads_no_torch_no_tritonclient_no_graphs() -> None:
    modules = [module(path) for path in sources("client")]
    script = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'tritonclient', 'sklearn', 'nobackfill.gallery.search.hnsw'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_generated_protos_are_fresh() -> None:
    done = subprocess.run(
        [sys.executable, "protos/generate.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_patterns_end_at_the_end() -> None:
    """`$` also matches before a newline at the end: "photos\\n" was the name of a gallery."""
    seen = 0
    for path in sources(*ARROWS, "demo", "bench", "tests"):
        for node in nodes(path):
            for pattern in patterns(node):
                seen += 1
                assert not ends_loosely(pattern), f"{path.relative_to(ROOT)}: {pattern}: write \\Z"
    assert seen > 30


def patterns(node: ast.AST) -> Iterator[str]:
    """Regular expressions that a call of `re` gets written out, unless each line shall match."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return
    of_re = isinstance(node.func.value, ast.Name) and node.func.value.id == "re"
    if not of_re or not node.args or re.search(r"re\.M|\(\?m", ast.unparse(node)):
        return
    for part in ast.walk(node.args[0]):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def ends_loosely(pattern: str) -> bool:
    """Whether a `$` stands in `pattern` that is neither escaped nor one of a set."""
    return "$" in re.sub(r"\\.|\[\^?\]?[^\]]*\]", "", pattern)


def test_the_check_of_patterns_can_fail() -> None:
    tree = ast.walk(ast.parse('re.match("^[a-z]+$", name)'))
    assert [ends_loosely(found) for node in tree for found in patterns(node)] == [True]
    assert not ends_loosely(r"^[a-z$]+\$\Z")


@pytest.mark.slow
def test_no_test_replaces_the_clock_of_all_threads() -> None:
    """Such a test moves the timers of servers that other tests of the process still run."""
    for path in sources("tests"):
        for node in nodes(path):
            assert not replaces_time(node), f"{path.relative_to(ROOT)}: use support/clock.py"


def replaces_time(node: ast.AST) -> bool:
    """Tell whether a call replaces a function of the module `time` itself."""
    if not (isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".setattr")):
        return False
    target = ast.unparse(node.args[0])
    return target == "time" or re.search(r"(^'|\.)time\.\w+'\Z", target) is not None


@pytest.mark.parametrize(
    ("call", "replaces"),
    [
        ("monkeypatch.setattr(time, 'sleep', waits.append)", True),
        ("monkeypatch.setattr('time.monotonic', clock)", True),
        ("monkeypatch.setattr('nobackfill.module.time.monotonic', clock)", True),
        ("monkeypatch.setattr('nobackfill.module.time', clock)", False),
        ("monkeypatch.setattr(module, 'time', clock)", False),
    ],
)
def test_the_check_of_clocks_can_fail(call: str, replaces: bool) -> None:
    assert any(map(replaces_time, ast.walk(ast.parse(call)))) is replaces


def product() -> dict[str, Path]:
    """The product's files by module name, compiled modules by their stubs."""
    rooms = [room for root, some in ROOTS.items() if root != "protos" for room in some]
    base = sorted((ROOT / "core" / "nobackfill").glob("*.py"))
    stubs = [path for room in rooms for path in sorted(folder(room).rglob("*.pyi"))]
    return {module(path): path for path in (*base, *sources(*rooms), *stubs)}


@functools.cache
def import_graph() -> Mapping[str, frozenset[str]]:
    """The modules of the product that each of them names in an import anywhere: lazy imports and
    those for annotations count, a package that is only on the way to a module does not."""
    known = product()
    return {name: frozenset(modules_named(path, known)) for name, path in known.items()}


def modules_named(path: Path, known: Collection[str]) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in inside]
        else:
            continue
        yield from (name for name in names if name in known)


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """Modules of which each imports the next and the last is the first; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))
    return []


def test_modules_import_each_other_in_no_circle() -> None:
    found = circle(import_graph())
    assert not found, f"a circle of imports: {' -> '.join(found)}"


def class_names() -> dict[str, list[str]]:
    """The modules that define a class, by its name."""
    modules: dict[str, list[str]] = {}
    for name, path in product().items():
        if path.suffix == ".py":
            classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
            for class_name in {node.name for node in classes}:
                modules.setdefault(class_name, []).append(name)
    return modules


def test_class_names_are_unique_in_the_product() -> None:
    doubled = {name: modules for name, modules in class_names().items() if len(modules) > 1}
    for name, modules in doubled.items():
        allowed = EXCEPTIONS["classes"].get(name, 1)
        assert len(modules) <= allowed, f"class {name} is defined in {modules}: rename the new one"
    counts = {name: len(doubled.get(name, "-")) for name in EXCEPTIONS["classes"]}
    assert counts == EXCEPTIONS["classes"], UNNEEDED


def importers(graph: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """The modules that import a module, by its name."""
    found: dict[str, list[str]] = {name: [] for name in graph}
    for name, imported in graph.items():
        for one in set(imported) - {name}:
            found[one].append(name)
    return found


def foreign(path: Path) -> set[str]:
    """Packages of others that a file imports, less those that most of the product loads."""
    return packages(path) - sys.stdlib_module_names - USUAL - {"nobackfill"}


def fragments() -> Iterator[str]:
    """Modules below 80 lines that are imported by one module of their folder and by no other,
    unless they isolate a package that is heavy or optional: their importer does without it.

    A package's own `__init__` is no such importer: it offers the module's names to others.
    """
    files = product()
    for name, imported_by in importers(import_graph()).items():
        path = files[name]
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.name == "__init__.py" or path.suffix == ".pyi" or len(lines) >= SHORT:
            continue
        only = files[imported_by[0]] if len(imported_by) == 1 else None
        if only is None or only.parent != path.parent or only.name == "__init__.py":
            continue
        if not foreign(path) - foreign(only):
            yield name


def test_short_modules_are_imported_by_more_than_one() -> None:
    allowed = [*EXCEPTIONS["short_modules"], *EXCEPTIONS["short_modules_with_a_reason"]]
    found = set(fragments())
    new = sorted(found - set(allowed))
    assert not new, f"{new}: merge each into the one module that imports it"
    old = [name for name in allowed if name not in found]
    assert not old, f"{old}: {UNNEEDED}"


def test_the_checks_of_modules_can_fail() -> None:
    assert circle({"a": ["b"], "b": ["c"], "c": ["a"], "d": ["a"]})[0] in "abc"
    assert not circle({"a": ["b", "c"], "b": ["c"], "c": []})
    assert importers({"a": ["b"], "b": ["b"], "c": ["b"]}) == {"a": [], "b": ["a", "c"], "c": []}
    graph = import_graph()
    # A lazy import, one for annotations, and one of compiled code.
    assert "nobackfill.client.search" in graph["nobackfill.client.device"]
    assert "nobackfill.release.manifest" in graph["nobackfill.release.image_model"]
    compiled = "nobackfill.gallery.search.view"
    assert "nobackfill.gallery.search._native" in graph[compiled]
