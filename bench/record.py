"""What a run leaves: a table on the screen and in the docs, and a JSON file that says where and
with what it was measured."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from bench.harness import Scale, Table, Value

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
DOCS = ROOT / "docs" / "benchmarks.md"
_PACKAGES = (
    "numpy", "onnxruntime", "hnswlib", "torch", "grpcio", "tritonclient", "pillow", "protobuf",
)  # fmt: skip
# Those that live in virtual environments of their own, below ROOT.
_APART = {"nvidia-pytriton": ".venv-triton", "chromadb": "build/chroma"}


def format_value(value: Value) -> str:
    """A value as people read it: three digits that count, thousands set apart."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) < 0.1 else f"{value:.3g}"


def format_table(table: Table | dict[str, Any]) -> str:
    """A table with its title and note."""
    if isinstance(table, Table):
        table = {"title": table.title, "rows": list(table.rows), "note": table.note}
    names = list(dict.fromkeys(name for row in table["rows"] for name in row))
    cells = [[format_value(row.get(name)) for name in names] for row in table["rows"]]
    widths = [max(map(len, column)) for column in zip(names, *cells, strict=True)]
    lines = [_line(names, widths), _line(["-" * width for width in widths], widths)]
    lines += [_line(row, widths) for row in cells]
    note = [table["note"], ""] if table["note"] else []
    return "\n".join([f"**{table['title']}**", "", *note, *lines, ""])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return f"| {' | '.join(c.ljust(w) for c, w in zip(cells, widths, strict=True))} |"


def result_path(topic: str, scale: Scale) -> Path:
    """Where a topic's newest result lies."""
    return RESULTS / f"{topic}{'' if scale is Scale.SMALL else f'-{scale}'}.json"


def save(path: Path, topic: str, scale: Scale, seconds: float, tables: Sequence[Table]) -> None:
    """Write a topic's tables, and what anyone needs to judge them."""
    result = {
        "topic": topic,
        "scale": scale,
        "seconds": round(seconds, 1),
        "machine": describe_machine(),
        "versions": library_versions(),
        "commit": describe_commit(),
        "tables": [
            {
                "title": t.title,
                "note": t.note,
                "rows": [dict(row) for row in t.rows],
                "rounds": {name: list(values) for name, values in (t.rounds or {}).items()},
            }
            for t in tables
        ],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def describe_machine() -> dict[str, str | int | float]:
    """The processor, its cores and how busy they were before this."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next((line.split(":")[1].strip() for line in lines if "model name" in line), model)
    return {
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "load_before": round(os.getloadavg()[0], 2),
    }


def library_versions() -> dict[str, str]:
    """Of Python and of what does the work, as far as it is installed."""
    places = dict.fromkeys(_PACKAGES, sys.path)
    for package, folder in _APART.items():
        places[package] = list(map(str, (ROOT / folder).glob("lib/python*/site-packages")))
    found = {"python": platform.python_version()}
    for package, path in places.items():
        for distribution in distributions(name=package, path=path):
            found[package] = distribution.version
    return found


def describe_commit() -> str:
    """The commit that was measured, marked where code differed from it."""
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--", ".", ":!bench/results", ":!docs")
    return f"{head}{'-dirty' if changed else ''}" if head else "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def refresh_docs(path: Path = DOCS, results: Path = RESULTS) -> None:
    """Put the newest tables, those of FULL=1 after the small ones, between the markers
    `<!-- NAME -->` and `<!-- end -->` of the docs."""
    lines: list[str] = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines():
        name = line.removeprefix("<!-- ").removesuffix(" -->")
        if line == "<!-- end -->":
            inside = False
        if not inside:
            lines.append(line)
        if line.startswith("<!-- ") and line != "<!-- end -->":
            inside = True
            small, full = (results / f"{name}{end}.json" for end in ("", "-full"))
            lines += _shown(small)
            if full.exists():
                lines += ["FULL=1:", *_shown(full)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _shown(path: Path) -> list[str]:
    if not path.exists():
        return ["", "Not measured yet.", ""]
    result = json.loads(path.read_text(encoding="utf-8"))
    where = result["machine"]
    origin = (
        f"{where['processor']}, {where['cores']} cores, load {where['load_before']} before; "
        f"commit {result['commit']}; {result['seconds']:.0f} s"
    )
    return ["", *(line for t in result["tables"] for line in [*format_table(t).splitlines(), ""]),
            f"*{origin}*", ""]  # fmt: skip
