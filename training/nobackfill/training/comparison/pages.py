"""Shortened tables in pages that people read, written from the results that their marks name.

A mark is a comment of its own line, `<!-- results: PATH -->` or `<!-- results: PATH in brief -->`,
PATH relative to the page; what follows it, up to `<!-- end of results -->`, is written by
`refresh`. In brief: only the rows that are always shown, and no claims.
"""

import re
import textwrap
from pathlib import Path

from nobackfill.durable import write_file
from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.training.comparison.configured import digest
from nobackfill.training.comparison.names import OURS, Name
from nobackfill.training.comparison.presets import PRESETS
from nobackfill.training.comparison.results import MAIN, UNSEEN, Results, read_results
from nobackfill.training.comparison.tables import (
    FIGURE_NAMES,
    WITHDRAWN,
    bars,
    head,
    is_withdrawn,
    kept,
    named,
    pair,
    seeds_line,
    whole,
)
from nobackfill.training.comparison.verdicts import FEWEST_SEEDS, FIGURES

SERVED, ALONE = "new/served", "old/old"
# Shown whatever they reach.
SHOWN = (
    Name.INDEPENDENT,
    Name.BCT,
    Name.BCT_SYS,
    Name.UNIBCT,
    Name.DMU,
    Name.AFFINE_SIMCLR,
    Name.SOFT_PROTOTYPES_SIMCLR,
    Name.FCT_SIMCLR,
    Name.FASTFILL_SIMCLR,
    OURS,
)
_END = "<!-- end of results -->"
_MARKED = re.compile(rf"(?m)^<!-- results: (\S+)( in brief)? -->\n(?s:.*?)^{_END}$")


def refresh(page: Path) -> list[Path]:
    """Write every marked table of a page anew, and the whole tables beside the results; or, of a
    file of results, the table beside it.

    Returns the results' files. Raises NotFoundError for a page or a file that is not there,
    InvalidInputError for a page without a mark and for a file of other things.
    """
    if not page.is_file():
        raise NotFoundError(f"{page}: no such page")
    if page.suffix == ".json":
        _write_whole(page)
        return [page]
    text = page.read_text("utf-8")
    found: list[Path] = []

    def written(mark: re.Match[str]) -> str:
        file = page.parent / mark[1]
        results = _write_whole(file)
        found.append(file)
        link = mark[1].removesuffix(".json") + ".md"
        first = f"<!-- results: {mark[1]}{mark[2] or ''} -->"
        return "\n".join([first, *shortened(results, link, brief=bool(mark[2])), _END])

    text = _MARKED.sub(written, text)
    if not found:
        raise InvalidInputError(
            f"{page}: expected a line `<!-- results: FILE.json -->` and a later line `{_END}`"
        )
    write_file(page, text.encode(), 0o644)
    return found


def _write_whole(file: Path) -> Results:
    results = read_results(file)
    write_file(file.with_suffix(".md"), whole(results).encode(), 0o644)
    return results


def shortened(results: Results, link: str, *, brief: bool = False) -> list[str]:
    """The rows that are always shown, and, but in brief, all that beat or tie ours in any
    column; below them what was measured, and, but in brief, the claims."""
    lines = head("served", "kept", "flips", "unseen served", "unseen kept")
    shown = rows_shown(results)
    chosen = [name for name in shown if name in SHOWN] if brief else shown
    for name in chosen:
        row, unseen = results.main.rows[name], results.unseen(name)
        told = f"**{named(name, row, results)}**" if name == OURS else named(name, row, results)
        fields = [pair(row, SERVED), kept(row), f"{100 * row.extras['negative_flips']:.1f}"]
        lines.append(f"| {told} | {' | '.join((*fields, pair(unseen, SERVED), kept(unseen)))} |")
    left_out = len(results.main.rows) - len(shown)
    caption = _rivals(results, link) if brief else _caption(results, link, left_out)
    return [*lines, "", *caption, ""]


def outdated(results: Results) -> bool:
    """Whether rows were trained on other splits, or by other configurations, than today's. A
    folder's are not known here.
    """
    if results.data not in PRESETS:
        return False
    rows = {split: tuple(part.rows) for split, part in results.splits.items()}
    try:
        return digest(PRESETS[results.data], rows) != results.made.configured
    except ConfigurationError:
        return True


def rows_shown(results: Results) -> list[str]:
    """Names, in the table's order."""
    chosen = {*SHOWN, *reaching(results)}
    return [name for name in results.main.rows if name in chosen]


def reaching(results: Results) -> dict[str, list[str]]:
    """By row, the columns in which it beats or, as it is shown, ties ours."""
    if OURS not in results.main.rows:
        return {}
    ours = _columns(results, OURS)
    found = {}
    for name, row in results.main.rows.items():
        if name == OURS or not row.shared:
            continue
        its = _columns(results, name)
        columns = [column for column in its if column in ours and its[column] >= ours[column]]
        if columns:
            found[name] = columns
    return found


def _columns(results: Results, name: str) -> dict[str, float]:
    """The columns as they are shown, larger = better; what is kept goes with what is served."""
    told = {}
    for split, part in ((MAIN, results.main.rows[name]), (UNSEEN, results.unseen(name))):
        for figure in FIGURES if part else ():
            assert part is not None
            told[f"{split} {FIGURE_NAMES[figure]}"] = part.cells[SERVED][figure][0]
    told["flips"] = -results.main.rows[name].extras["negative_flips"]
    return {column: round(1000 * value) for column, value in told.items()}


def _caption(results: Results, link: str, left_out: int) -> list[str]:
    told = [f"`{results.made.command}`, {results.made.machine}. {seeds_line(results)}"]
    if outdated(results):
        told.append("Measured by other splits or configurations than today's.")
    if best := bars(results):
        told.append(f"*Kept* is held to the best new/new: {best}.")
    old = [part.rows[next(iter(part.rows))] for part in results.splits.values()]
    told.append(f"The old model alone: {', on unseen classes '.join(pair(r, ALONE) for r in old)}.")
    rest = (
        f"{left_out} rows, below ours in each of these columns or in settings of their own, are "
        f"left out: [the whole table]({link})"
        if left_out
        else f"[More figures]({link})"
    )
    told.append(f"{rest}, with every claim.")
    points = [f"Rows that beat or tie ours: {_reaching_named(results)}.", *_claims(results)]
    return [_wrapped(" ".join(told)), "", *(_wrapped(point, "- ") for point in points)]


def _rivals(results: Results, link: str) -> list[str]:
    told = (
        f"{seeds_line(results)} Rows that beat or tie ours: {_reaching_named(results)}. "
        f"[All rows, and every claim of the papers]({link})."
    )
    return [_wrapped(told)]


def _reaching_named(results: Results) -> str:
    rivals = [f"`{name}` ({', '.join(by)})" for name, by in reaching(results).items()]
    return "; ".join(rivals) or "none"


def _wrapped(text: str, mark: str = "") -> str:
    return textwrap.fill(
        mark + text,
        118,
        subsequent_indent=" " * len(mark),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _claims(results: Results) -> list[str]:
    """By split and figure, how many claims hold, and which fail; or that they are withdrawn."""
    if any(is_withdrawn(part.claims) for part in results.splits.values()):
        return [WITHDRAWN]
    lines = []
    for split, part in results.splits.items() if len(results.seeds) >= FEWEST_SEEDS else ():
        for figure in FIGURES:
            found = {text: by[figure] for text, by in part.claims.items() if figure in by}
            failed = [text for text, one in found.items() if one.verdict == "fails"]
            holds = sum(one.verdict == "holds" for one in found.values())
            undecided = len(found) - holds - len(failed)
            told = [f"{holds} of {len(found)} claims hold", f"{undecided} are undecided"]
            told.append(f"{len(failed)} fail" + (f": {'; '.join(failed)}" if failed else ""))
            lines.append(f"On {split} classes by {FIGURE_NAMES[figure]} {', '.join(told)}.")
    return lines
