"""A run in parts: the tables as far as they are done are shown, and kept."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from bench import record
from bench.harness import Row, Scale, Table


@dataclass(frozen=True)
class Part:
    """Rows of the table `title` about one pair of models, which `rows` names as `pair`."""

    title: str
    pair: str
    rows: Callable[[], list[Row]]


def run_parts(topic: str, parts: Iterable[Part], notes: Mapping[str, str], only: str) -> None:
    """One part after the other; `notes` by title. A run that is cut short keeps what was done.
    `only`: text in the names of the pairs that are measured; what is kept of others stays."""
    started = time.perf_counter()
    path = record.result_path(topic, Scale.SMALL)
    done: dict[str, list[Row]] = {}
    for part in parts:
        if only not in part.pair:
            continue
        rows = part.rows()
        done.setdefault(part.title, []).extend(rows)
        tables = [
            Table(title, every, notes.get(title, ""))
            for title, every in (_joined(path, done) if only else done).items()
        ]
        record.save(path, topic, Scale.SMALL, time.perf_counter() - started, tables)
        if rows:
            print(record.format_table(Table(part.title, rows)), flush=True)


def _joined(path: Path, done: Mapping[str, list[Row]]) -> dict[str, list[Row]]:
    """With the rows of other pairs that lie there, read anew: another run may add to them."""
    every: dict[str, list[Row]] = {}
    if path.exists():
        tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
        every = {table["title"]: table["rows"] for table in tables}
    for title, rows in done.items():
        measured = {row.get("pair") for row in rows}
        others = [row for row in every.get(title, []) if row.get("pair") not in measured]
        every[title] = others + rows
    return every
