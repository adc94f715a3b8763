"""Measuring: rounds, ratios, spreads, and what is left of a run."""

import itertools
import json
import re
from pathlib import Path

import pytest

from bench import record
from bench.harness import (
    Contender,
    Measurement,
    Scale,
    Table,
    comparison_table,
    measure_rate,
    run_interleaved,
    time_call,
)
from bench.run import TOPICS


def test_contenders_take_turns_and_the_first_round_is_not_counted() -> None:
    order: list[str] = []

    def contender(name: str) -> Contender:
        def work() -> float:
            order.append(name)
            return float(len(order))

        return Contender(name, work)

    measured = run_interleaved([contender("a"), contender("b"), contender("c")], 3)
    rounds = [set(order[start : start + 3]) for start in range(0, 12, 3)]
    assert rounds == [{"a", "b", "c"}] * 4
    # Nobody is always first: what slows a round down slows each contender in turn.
    assert {order[start] for start in range(0, 12, 3)} == {"a", "b", "c"}
    assert all(len(one.rounds) == 3 for one in measured.values())
    assert min(min(one.rounds) for one in measured.values()) > 3


def test_without_warmth_every_round_counts() -> None:
    numbers = itertools.count(1)
    measured = run_interleaved([Contender("a", lambda: float(next(numbers)))], 2, warm=False)
    assert measured["a"].rounds == (1.0, 2.0)


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that gets ten times slower half-way changes medians, not the ratio."""
    mine, its = Measurement((200.0, 20.0, 20.0)), Measurement((100.0, 10.0, 10.0))
    assert mine.ratio(its) == 2
    assert mine.median == 20
    assert mine.spread == pytest.approx(4.5)


def test_compared_names_the_limit() -> None:
    table = comparison_table(
        "T", "x/s", {"limit": Measurement((4.0,)), "ours": Measurement((3.0,))}, "limit"
    )
    assert [row["of limit"] for row in table.rows] == [1.0, 0.75]
    assert table.rounds == {"limit": (4.0,), "ours": (3.0,)}


def test_rate_counts_items_and_works_at_least_once() -> None:
    done: list[int] = []
    assert measure_rate(lambda: done.append(1), 100, at_least=0) > 0
    assert len(done) == 1
    assert time_call(lambda: done.append(2)) >= 0
    assert done == [1, 2]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (12345, "12,345"),
        (0.5, "0.5"),
        (0.01234, "0.0123"),
        (1e6, "1,000,000"),
    ],
)
def test_figures_are_shown_with_the_digits_that_count(value: float | None, shown: str) -> None:
    assert record.format_value(value) == shown


def test_a_table_has_every_column_of_its_rows() -> None:
    text = record.format_table(Table("Title", [{"a": 1}, {"a": 2, "b": "x"}], "A note."))
    assert text.splitlines() == [
        "**Title**", "", "A note.", "",
        "| a | b |", "| - | - |", "| 1 | - |", "| 2 | x |",
    ]  # fmt: skip


def test_a_result_tells_machine_versions_and_commit(tmp_path: Path) -> None:
    path = tmp_path / "results" / "topic.json"
    table = Table("T", [{"a": 1.5}], rounds={"a": [1.0, 2.0]})
    record.save(path, "topic", Scale.SMALL, 1.0, [table])
    saved = json.loads(path.read_text())
    assert saved["machine"]["cores"] >= 1
    assert saved["versions"]["numpy"]
    assert saved["commit"]
    assert saved["tables"] == [
        {"title": "T", "note": "", "rows": [{"a": 1.5}], "rounds": {"a": [1.0, 2.0]}}
    ]


def test_docs_show_the_newest_tables_and_keep_their_own_words(tmp_path: Path) -> None:
    docs, results = tmp_path / "docs.md", tmp_path / "results"
    docs.write_text(
        "# Words\n\n<!-- topic -->\nold\n<!-- end -->\n\n<!-- other -->\n<!-- end -->\n"
    )
    record.save(results / "topic.json", "topic", Scale.SMALL, 1, [Table("T", [{"a": 1}])])
    record.refresh_docs(docs, results)
    first = docs.read_text()
    assert "| 1 |" in first
    assert "old" not in first
    assert first.startswith("# Words\n")
    assert "Not measured yet." in first
    record.refresh_docs(docs, results)
    assert docs.read_text() == first
    record.save(results / "topic-full.json", "topic", Scale.FULL, 1, [Table("T", [{"a": 7}])])
    record.refresh_docs(docs, results)
    assert docs.read_text().index("| 1 |") < docs.read_text().index("| 7 |")


def test_the_docs_show_what_was_measured_last(tmp_path: Path) -> None:
    docs = tmp_path / "benchmarks.md"
    docs.write_text(record.DOCS.read_text())
    record.refresh_docs(docs)
    assert docs.read_text() == record.DOCS.read_text(), (
        "run `python -m bench.run --docs` and commit"
    )


def test_the_docs_have_a_place_for_each_topic() -> None:
    assert re.findall(r"^<!-- (?!end)(\w+) -->$", record.DOCS.read_text(), re.M) == list(TOPICS)
