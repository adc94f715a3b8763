"""Results as Markdown: every row, every further figure, every claim."""

from collections.abc import Mapping

from nobackfill.metrics.bootstrap import FEWEST_CLASSES
from nobackfill.training.comparison.limits import LIMIT
from nobackfill.training.comparison.ranges import KNOWN, NEW, RANGED
from nobackfill.training.comparison.results import UNSEEN, Outcome, Results, RowResult
from nobackfill.training.comparison.verdicts import FEWEST_SEEDS, FIGURES

ENDS = ("old/old", "new/old", "new/new", "new/served")
TITLES = (*ENDS[:3], "served", "kept", "flips")
UNSEEN_TITLES = ("unseen old/old", "unseen new/new", "unseen served", "unseen kept")
WITHDRAWN = (
    "The claims are withdrawn: their verdicts took queries of one class as independent, and no "
    "figures by query are kept to draw classes from. `compare.py` decides them when it is run "
    "again."
)
FEW_CLASSES = (
    f"Fewer than {FEWEST_CLASSES} classes are no sample of others: claims on them are undecided."
)
FIGURE_NAMES = {"cmc1": "CMC-1", "map": "mAP"}


def whole(results: Results) -> str:
    """The page beside a JSON file."""
    lines = [f"# Methods compared on {results.data}", "", *_about(results), "", *_table(results)]
    lines += _further(results)
    for split, part in results.splits.items():
        lines += ["", f"## Claims, {split} classes", "", *_said_of(part.claims)]
        lines += claims_table(part.claims)
    return "\n".join(lines) + "\n"


def head(*titles: str) -> list[str]:
    """The first two lines of a table of methods."""
    return [f"| {' | '.join(('method', *titles))} |", "|---" * (len(titles) + 1) + "|"]


def pair(row: RowResult | None, cell: str) -> str:
    """CMC-1 / mAP of a cell in percent, with mAP's deviation where there is one."""
    if row is None or cell not in row.cells:
        return "-"
    (cmc1, _), (map_, deviation) = (row.cells[cell][figure] for figure in FIGURES)
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * cmc1:.1f} / {100 * map_:.1f}{spread}"


def kept(row: RowResult | None) -> str:
    """What is kept of the best new/new, CMC-1 / mAP in percent."""
    if row is None or not row.held_to:
        return "-"
    return " / ".join(f"{100 * row.extras[f'kept_{figure}']:.1f}" for figure in FIGURES)


def named(name: str, row: RowResult | None, results: Results) -> str:
    """The row's name, with its seeds where they are fewer than the table's."""
    if row is None or row.seeds == len(results.seeds):
        return name
    return f"{name} ({row.seeds} seed{'s' if row.seeds > 1 else ''})"


def seeds_line(results: Results) -> str:
    """How many, and what one of them is worth."""
    count = len(results.seeds)
    if count < FEWEST_SEEDS:
        return f"One seed ({results.seeds[0]}): no deviation, and no claim is decided."
    first, last = results.seeds[0], results.seeds[-1]
    between = last - first + 1 == count
    named = f"{first} to {last}" if between else ", ".join(map(str, results.seeds))
    return f"{count} seeds ({named}), ± the standard deviation of mAP."


def bars(results: Results) -> str:
    """What `kept` is held to in the rows that share the old model."""
    told = []
    for split, part in results.splits.items():
        row = next((r for r in part.rows.values() if r.shared and r.held_to), None)
        if row is None:
            continue
        best = [row.held_to[figure] for figure in FIGURES]
        names = [f"`{bar.row}` by {FIGURE_NAMES[f]}" for f, bar in zip(FIGURES, best, strict=True)]
        who = f"`{best[0].row}`" if best[0].row == best[1].row else " and ".join(names)
        values = " / ".join(f"{100 * bar.value:.1f}" for bar in best)
        told.append(f"{who} on {split} classes ({values})")
    return ", ".join(told)


def _about(results: Results) -> list[str]:
    return [
        f"{seeds_line(results)} Distance: {results.metric}; CMC-1 / mAP in percent, means over "
        "seeds. *Served* is what a user gets: the gallery as it is for backward-compatible models, "
        "carried over for transforms. *Kept* is its share of the best new/new of all rows that "
        f"learned the same: {bars(results) or 'there is none'}. *Flips*: queries answered by the "
        "old model alone and no longer. *Unseen*: tested on classes that no model trained on."
        f"{_limits(results)}",
        "",
        f"`{results.made.command}`, {results.made.machine}.",
    ]


def _limits(results: Results) -> str:
    """What the bounds are, where there are any."""
    if not any(name.startswith(f"{LIMIT}:") for name, _, _ in _both(results)):
        return ""
    return (
        f" *{LIMIT}*: no methods, bounds on what any transform of the stored vectors can reach: an "
        "affine map solved on the tested items themselves, and on unseen classes ours trained on "
        "other images of them."
    )


def _table(results: Results) -> list[str]:
    lines = head(*TITLES, *UNSEEN_TITLES)
    for name, row, unseen in _both(results):
        fields = [pair(row, cell) for cell in ENDS]
        flips = None if row is None else row.extras["negative_flips"]
        fields += [kept(row), _percent(flips)]
        fields += [pair(unseen, cell) for cell in ("old/old", "new/new", "new/served")]
        told = named(name, row or unseen, results)
        lines.append(f"| {told} | {' | '.join((*fields, kept(unseen)))} |")
    return lines


def _both(results: Results) -> list[tuple[str, RowResult | None, RowResult | None]]:
    """Every row by name, on main and on unseen classes; a bound may be on the latter alone."""
    main, other = results.main.rows, results.splits.get(UNSEEN)
    names = dict.fromkeys((*main, *(other.rows if other else ())))
    return [(name, main.get(name), results.unseen(name)) for name in names]


def _further(results: Results) -> list[str]:
    cells = ("served/served", *(f"{cell}, {part}" for cell in RANGED for part in (KNOWN, NEW)))
    lines = [
        "",
        "## Further figures, main classes",
        "",
        "mAP in percent. *Known* classes trained the old model, *new* ones did not (FCT appendix "
        "C). *Held to*: the row with the best new/new by mAP. CKA: how alike the old embedding and "
        "the side-information are (0 to 1). Bytes: the old embedding and the side-information of "
        "an item, float32 or a bit a number; the gallery keeps float32 for either. µs: the "
        "transform of an item, the exported file, one thread.",
        "",
        *head(*cells, "held to", "CKA", "bytes", "µs"),
    ]
    for name, row in results.main.rows.items():
        fields = [_percent(row.mean(cell, "map")) for cell in cells]
        fields.append(row.held_to["map"].row if row.held_to else "-")
        fields.append(f"{row.extras['cka']:.2f}" if "cka" in row.extras else "-")
        cost = results.costs[name]
        fields += [f"{cost.stored:.0f}", f"{cost.microseconds:.2f}"]
        lines.append(f"| {name} | {' | '.join(fields)} |")
    return lines


def _said_of(claims: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Sentences that a reader of the claims must know first."""
    if is_withdrawn(claims):
        return [WITHDRAWN, ""]
    few = any(one.bounds is None for figures in claims.values() for one in figures.values())
    return [FEW_CLASSES, ""] if few else []


def is_withdrawn(claims: Mapping[str, Mapping[str, Outcome]]) -> bool:
    """Whether the claims were judged before classes were drawn; see Outcome."""
    outcomes = (one for figures in claims.values() for one in figures.values())
    return any(one.verdict == "withdrawn" for one in outcomes)


def claims_table(claims: Mapping[str, Mapping[str, Outcome]]) -> list[str]:
    """Each claim's verdict by CMC-1 and by mAP, with the difference in percentage points."""
    lines = ["| claim | CMC-1 | difference | mAP | difference |", "|---|---|---|---|---|"]
    for text, figures in claims.items():
        fields = [field for figure in FIGURES for field in _outcome(figures.get(figure))]
        lines.append(f"| {text}{_against(figures)} | {' | '.join(fields)} |")
    return lines


def _outcome(outcome: Outcome | None) -> tuple[str, str]:
    if outcome is None:
        return "-", "-"
    difference = f"{100 * outcome.difference:+.2f}"
    if outcome.bounds is None:
        few = "" if outcome.classes is None else f" [{outcome.classes} classes]"
        return outcome.verdict, f"{difference}{few}"
    low, high = outcome.bounds
    return outcome.verdict, f"{difference} [{100 * low:+.2f}, {100 * high:+.2f}]"


def _against(figures: Mapping[str, Outcome]) -> str:
    rivals = dict.fromkeys(outcome.rival for outcome in figures.values() if outcome.rival)
    return f" ({', '.join(rivals)})" if rivals else ""


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}"
