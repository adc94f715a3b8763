"""Tables in pages: which rows they show, what they tell of the rest, and that they are fresh."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.research.compare import app
from nobackfill.research.pages import (
    format_short_table,
    list_shown_rows,
    results_page,
    rewrite_tables,
)
from nobackfill.research.results import (
    ClaimOutcome,
    CostResult,
    Provenance,
    Results,
    RowResult,
    SplitResult,
    read_results,
)
from nobackfill.research.rows import OURS
from nobackfill.research.vector_bench import BenchDifference, BenchResults, BenchRow, write_bench

ROOT = Path(__file__).parents[2]
RESULTS = sorted((ROOT / "bench" / "results").glob("compare-*.json"))


def row(cmc1: float, map_: float, flips: float, *, shared: bool = True) -> RowResult:
    cell = {"cmc1": (cmc1, 0.01), "map": (map_, 0.01)}
    cells = dict.fromkeys(("old/old", "new/new", "new/served"), cell)
    extras = {"negative_flips": flips}
    return RowResult(seeds=2, shared=shared, cells=cells, held_to={}, extras=extras)


def results(**rows: RowResult) -> Results:
    outcome = ClaimOutcome(
        seeds=2, difference=-0.1, bounds=(-0.2, -0.05), verdict="fails", classes=12
    )
    claims = {"a > b": {"map": outcome}}
    return Results(
        data="folder",
        metric="cosine",
        seeds=(100, 101),
        made=Provenance(command="a command", machine="a machine", configured=""),
        splits={"main": SplitResult(rows=rows, claims=claims)},
        costs={},
    )


def test_rows_that_beat_or_tie_ours_anywhere_are_shown() -> None:
    found = list_shown_rows(
        results(
            **{OURS: row(0.9, 0.8, 0.05)},
            affine=row(0.8, 0.7, 0.10),
            better=row(0.8, 0.9, 0.10),
            tie=row(0.90004, 0.7, 0.10),
            fewer_flips=row(0.8, 0.7, 0.01),
            elsewhere=row(1.0, 1.0, 0.0, shared=False),
            bct=row(0.1, 0.1, 0.5),
        )
    )
    assert found == [OURS, "better", "tie", "fewer_flips", "bct"]


def test_the_page_names_the_best_row_of_each_column() -> None:
    told = " ".join(
        " ".join(
            format_short_table(
                results(
                    **{OURS: row(0.9, 0.8, 0.05)},
                    tie=row(0.90004, 0.7, 0.01),
                    better=row(0.8, 0.95, 0.1),
                    elsewhere=row(1.0, 1.0, 0.0, shared=False),
                ),
                "all.md",
            )
        ).split()
    )
    best = f"main CMC-1 `{OURS}` and `tie` (90.0), main mAP `better` (95.0), flips `tie` (1.0)."
    assert f"Best row by column: {best}" in told


def test_a_table_says_how_many_classes_it_tests() -> None:
    (digits,) = (file for file in RESULTS if file.name == "compare-digits-core.json")
    told = " ".join(" ".join(format_short_table(read_results(digits), "all.md")).split())
    assert "Main tests 10 classes; unseen tests 3 classes; unseen classes are too few" in told


def test_the_page_says_what_is_left_out_and_what_fails() -> None:
    told = "\n".join(
        format_short_table(
            results(**{OURS: row(0.9, 0.8, 0.05)}, affine=row(0.8, 0.7, 0.1)), "all.md"
        )
    )
    assert "1 rows, below ours" in told and "[the whole table](all.md)" in told
    assert "0 of 1 claims hold, 0 are undecided, 1 fail: a > b." in told
    assert "a command" in told and "a machine" in told


# A table of side-information alone has no row of ours.
RANKED = [file for file in RESULTS if OURS in read_results(file).main.rows]


@pytest.mark.parametrize("file", RANKED, ids=lambda file: file.stem)
def test_a_table_shows_at_most_ten_rows_beside_those_that_reach_ours(file: Path) -> None:
    measured = read_results(file)
    ours = measured.main.rows[OURS]
    names, reach = list_shown_rows(measured), []
    for name in names:
        its, unseen = measured.main.rows[name], measured.unseen(name)
        pairs = [(its, ours)] + [(unseen, u) for u in [measured.unseen(OURS)] if unseen and u]
        better = [
            round(a.cells["new/served"][f][0], 3) >= round(b.cells["new/served"][f][0], 3)
            for a, b in pairs
            if a and b
            for f in ("cmc1", "map")
        ]
        if any(better) or its.extras["negative_flips"] <= ours.extras["negative_flips"] + 1e-3:
            reach.append(name)
    assert len(names) - len(reach) <= 10 and OURS in reach


def test_pages_are_as_the_command_writes_them(tmp_path: Path) -> None:
    """After a change: `make tables`."""
    for folder in ("bench", "docs"):
        (tmp_path / folder).mkdir()
    shutil.copytree(ROOT / "bench" / "results", tmp_path / "bench" / "results")
    shown = [tmp_path / "docs/methods.md", tmp_path / "docs/tutorials/researcher.md"]
    for page in shown:
        page.parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / page.relative_to(tmp_path), page)
    copies = [tmp_path / file.relative_to(ROOT) for file in RESULTS]
    done = CliRunner().invoke(app, [f"--page={page}" for page in (*shown, *copies)])
    assert done.exit_code == 0, done.output
    for written in (*shown, *(copy.with_suffix(".md") for copy in copies)):
        assert written.read_text() == (ROOT / written.relative_to(tmp_path)).read_text()
    pages = [rewrite_tables(page) for page in shown]
    assert [len(files) for files in pages] == [8, 1]
    for written in pages[0]:
        full = written.resolve().relative_to(tmp_path.resolve()).with_suffix(".md")
        assert (tmp_path / full).read_text() == (ROOT / full).read_text()


def test_every_row_with_a_backfill_shows_its_curve() -> None:
    """In each order that it has, from served to new/new; a row without a curve is left out."""
    with_curve = row(0.8, 0.7, 0.1)
    cells = {**with_curve.cells, "backfill random": {"cmc1": (0.85, 0.01), "map": (0.75, 0.02)}}
    found = results(fastfill_joint=with_curve.model_copy(update={"cells": cells}))
    plain = results(affine=row(0.6, 0.5, 0.1))
    costs = {"fastfill_joint": CostResult(stored=4, microseconds=1.0)}
    page = results_page(found.model_copy(update={"costs": costs}))
    line = (
        "| fastfill_joint | 80.0 / 70.0 ± 1.0 | 85.0 / 75.0 ± 2.0 | - | - | - | 80.0 / 70.0 ± 1.0 |"
    )
    assert line in page
    costs = {"affine": CostResult(stored=4, microseconds=1.0)}
    assert "## Backfill" not in results_page(plain.model_copy(update={"costs": costs}))


def test_in_brief_are_the_rows_always_shown_and_who_beats_ours() -> None:
    measured = results(
        **{OURS: row(0.9, 0.8, 0.05)}, bct=row(0.1, 0.1, 0.5), better=row(0.8, 0.9, 0.1)
    )
    told = "\n".join(format_short_table(measured, "all.md", brief=True))
    assert "| bct |" in told and f"| **{OURS}** |" in told and "| better |" not in told
    assert "beat or tie ours: `better` (main mAP)" in told and "](all.md)" in told


def test_a_page_without_marks_or_results_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    with pytest.raises(NotFoundError, match="there is no such file"):
        rewrite_tables(page)
    page.write_text("<!-- results: none.json -->\n")
    with pytest.raises(InvalidInputError, match="end of results"):
        rewrite_tables(page)
    page.write_text("<!-- results: none.json -->\n<!-- end of results -->\n")
    with pytest.raises(NotFoundError, match="does not exist"):
        rewrite_tables(page)
    assert page.read_text() == "<!-- results: none.json -->\n<!-- end of results -->\n"


def bench(part: str, ours: float) -> BenchResults:
    """Two maps beside the old model: ours, which is better, and one that is worse."""

    def difference(mean: float, spread: float = 0.01) -> dict[str, dict[str, BenchDifference]]:
        one = BenchDifference(mean=mean, low=mean - spread, high=mean + spread, classes=20)
        return {part: {"cmc1": one, "map": one}}

    def figures(value: float) -> dict[str, dict[str, float]]:
        return {part: {"cmc1": value, "map": value / 2, "known_item": 0.25}}

    worse = BenchRow(
        maps="queries", figures=figures(0.4), differences=difference(-0.1),
        against_ours=difference(0.4 - ours, spread=0.2), seconds=60, parameters=1234,
    )  # fmt: skip
    best = BenchRow(
        maps="items", figures=figures(ours), differences=difference(ours - 0.5), seconds=120,
        parameters=99,
    )  # fmt: skip
    stay = BenchRow(maps="none", figures=figures(0.5), differences={part: {}})
    return BenchResults(
        command="a command", machine="a CPU", pairs=10, seeds=1, queries={part: 70},
        classes={part: 20},
        rows={"old/old": stay, "residual_side": best, "affine": worse,
              "fct": BenchRow(maps="items", refusal="no")},
    )  # fmt: skip


def test_results_on_vectors_share_a_table_of_figures_and_of_differences(tmp_path: Path) -> None:
    for name, ours in (("seen", 0.65), ("unseen", 0.505)):
        write_bench(tmp_path, name, bench(f"{name} classes", ours))
        (tmp_path / f"{name}.md").unlink()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- vectors: seen.json unseen.json -->\n<!-- end of results -->\n")
    assert rewrite_tables(page) == [tmp_path / "seen.json", tmp_path / "unseen.json"]
    assert all((tmp_path / f"{name}.md").read_text() for name in ("seen", "unseen"))
    text = page.read_text()
    assert text.startswith("before\n<!-- vectors: seen.json unseen.json -->\n| row |")
    first = "| **residual_side** | items | 65.0 | 32.5 | 25.0 | 50.5 | 25.2 | 25.0 | 120 / 120 s |"
    assert first in text and "| affine | queries | 40.0 |" in text
    assert "| fct | items | - | - | - | - | - | - | - | - |" in text
    lower = "-10.0 [-11.0, -9.0]"
    assert f"| affine | {lower} | {lower} | {lower} | {lower} | -25.0 [-45.0, -5.0] |" in text
    told = " ".join(text.split())
    assert "one seed, which proves nothing about others" in told and "in 3 minutes" in told
    assert "Best: seen CMC-1 `residual_side` (65.0)" in told
    above = "Measurably above `old/old`: seen CMC-1 `residual_side`; seen mAP `residual_side`"
    # An interval with 0 in it says nothing.
    assert f"{above}; unseen CMC-1 none; unseen mAP none." in told
    assert "below `residual_side`: seen CMC-1 `affine`; seen mAP `affine`; unseen CMC-1 no" in told
    again = page.read_text()
    rewrite_tables(page)
    assert page.read_text() == again
    (tmp_path / "seen.json").write_text("{}")
    with pytest.raises(InvalidInputError, match=r"expected results of compare\.py --vectors"):
        rewrite_tables(page)


def test_results_without_labels_are_told_apart_by_their_pairs(tmp_path: Path) -> None:
    """Intervals over queries are shown, and no row is called measurably better by them."""

    def texts(pairs: int, **agreement: float) -> BenchResults:
        def row(name: str, value: float) -> BenchRow:
            def less(base: float, *figures: str) -> dict[str, dict[str, BenchDifference]]:
                mean = value - base
                one = BenchDifference(mean=mean, low=mean - 0.01, high=mean + 0.01, classes=None)
                return {"all": dict.fromkeys(figures, one)}

            return BenchRow(
                maps="items", figures={"all": {"agreement": value, "known_item": value / 2}},
                differences=less(0.5, "agreement"), seconds=60, parameters=7,
                against_ours={} if name == "residual" else less(0.6, "agreement", "known_item"),
            )  # fmt: skip

        stay = BenchRow(maps="none", figures={"all": {"agreement": 0.5}}, differences={"all": {}})
        return BenchResults(
            command="a command", machine="a CPU", pairs=pairs, seeds=3, queries={"all": 70},
            classes={"all": 0},
            rows={"old/old": stay} | {name: row(name, value) for name, value in agreement.items()},
        )  # fmt: skip

    write_bench(tmp_path, "few", texts(300, residual=0.6, affine=0.55))
    write_bench(tmp_path, "many", texts(1000, residual=0.6))
    page = tmp_path / "page.md"
    page.write_text("<!-- vectors: few.json many.json -->\n<!-- end of results -->\n")
    rewrite_tables(page)
    text = page.read_text()
    assert (
        "| row | maps | 300 pairs agreement@10 | 300 pairs known-item | 1,000 pairs agreement@10 |"
    ) in text
    assert "| **residual** | items | 60.0 | 30.0 | 60.0 | 30.0 | 60 / 60 s | 7 |" in text
    assert "| affine | items | 55.0 | 27.5 | - | - | 60 / - s | 7 |" in text
    assert "In points, with 95 % intervals over queries:" in text
    assert "| affine | +5.0 [+4.0, +6.0] | - | -5.0 [-6.0, -4.0] | -5.0" in text
    told = " ".join(text.split())
    # Three seeds of two maps at a minute.
    assert "300 training pairs, 70 queries; all maps were fitted in 6 minutes" in told
    assert "3 seeds" in told and "Measurably" not in text
