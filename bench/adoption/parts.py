"""A run in parts: the tables as far as they are done are shown, and kept."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from bench import record
from bench.harness import Row, Scale, Table


@dataclass(frozen=True)
class Part:
    """Rows of the table `title`, which may be of several parts."""

    title: str
    rows: Callable[[], list[Row]]


def run(topic: str, parts: Iterable[Part], notes: Mapping[str, str]) -> None:
    """One part after the other; `notes` by title. A run that is cut short keeps what was done."""
    started = time.perf_counter()
    done: dict[str, list[Row]] = {}
    for part in parts:
        rows = part.rows()
        done.setdefault(part.title, []).extend(rows)
        tables = [Table(title, every, notes.get(title, "")) for title, every in done.items()]
        path = record.result_path(topic, Scale.SMALL)
        record.save(path, topic, Scale.SMALL, time.perf_counter() - started, tables)
        if rows:
            print(record.markdown(Table(part.title, rows)), flush=True)
