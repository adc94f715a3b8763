"""The reference of the Python faces: what each room offers, by its own docstrings."""

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
# In the order in which a reader meets them.
ROOMS = (
    "client", "wire", "adopt", "adopt.sources", "adopt.embedding", "serve", "serving", "gallery",
    "gallery.search", "release", "release.publishing", "release.trust", "metrics", "quality",
    "report", "training", "training.data", "training.networks", "training.losses",
    "training.side_info", "training.methods", "training.loop", "training.export",
    "training.protocols", "research", "research.rivals", "server",
)  # fmt: skip


def page() -> str:
    """The page, in Markdown."""
    lines = [
        "# Python",
        "",
        "Generated from docstrings. Examples run in `tests/test_faces.py`.",
        "",
    ]
    for room in ROOMS:
        lines += _room(f"nobackfill.{room}")
    return "\n".join(lines)


def _room(name: str) -> Iterator[str]:
    module = import_module(name)
    yield from (f"## {name}", "", *_text(inspect.getdoc(module) or ""), "")
    for word, thing in offered(name).items():
        yield from _object(word, thing)


def offered(package: str) -> dict[str, object]:
    """What a face offers, by name; where it leaves that to its modules, MODULE.NAME of each."""
    face, path = import_module(package), _file(package)
    if own := _named(path):
        return {name: getattr(face, name) for name in own}
    return {
        f"{file.stem}.{name}": getattr(import_module(f"{package}.{file.stem}"), name)
        for file in sorted(path.parent.glob("*.py"))
        if file != path
        for name in _named(file)
    }


def _file(package: str) -> Path:
    place = package.replace(".", "/")
    (path,) = (*ROOT.glob(f"*/{place}/__init__.py"), *ROOT.glob(f"*/{place}.py"))
    return path


def _named(path: Path) -> list[str]:
    """Public names: what a file imports under its own name, lazily or not, and what it defines."""
    tree = ast.parse(path.read_text("utf-8"))
    found = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    defined = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    return sorted(found | {node.name for node in defined if not node.name.startswith("_")})


def _object(name: str, thing: object) -> Iterator[str]:
    yield from (f"### {name}", "")
    if callable(thing):
        short = name.rpartition(".")[2]
        yield from ("```python", f"{short}{_signature(thing)}", "```", "")
    if inspect.isclass(thing) or inspect.isroutine(thing):
        yield from (*_text(inspect.getdoc(thing) or ""), "")
    if inspect.isclass(thing):
        for word, method in inspect.getmembers(thing, inspect.isroutine):
            said = inspect.getdoc(method)
            # What every object has, and what is inherited from other libraries, is not ours.
            if word.startswith("_") or not said or not _ours(method):
                continue
            yield from (f"**`{word}{_signature(method)}`**", "", *_text(said), "")


def _ours(thing: object) -> bool:
    return str(getattr(thing, "__module__", "")).startswith("nobackfill.")


def _signature(thing: object) -> str:
    try:
        # Callable by whoever asks; what C code offers has no signature.
        return str(inspect.signature(thing)).replace("'", "")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return "(…)"


def _text(docstring: str) -> Iterator[str]:
    """Examples as code, and nothing of the rest as HTML."""
    inside = False
    for line in docstring.splitlines():
        example = line.startswith(">>>") or (inside and bool(line.strip()))
        if example is not inside:
            yield "```" if inside else "```python"
            inside = example
        yield line if inside or line.startswith("    ") else line.replace("<", "&lt;")
    if inside:
        yield "```"
