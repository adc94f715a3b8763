"""What each way of serving old vectors gains over the old release, and whether that lets it out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.errors import few
from nobackfill.metrics.bootstrap import FEWEST_CLASSES, Difference, paired_bootstrap
from nobackfill.metrics.ranking import Ints
from nobackfill.metrics.retrieval import PerQuery
from nobackfill.quality.cells import CellName
from nobackfill.quality.retrieval import Measured
from nobackfill.release.evidence import Unlabelled
from nobackfill.release.manifest import GateVerdict, Manifest
from nobackfill.release.routes import plan_route
from nobackfill.release.trust.publication import Publication

# Of each query's hits: how many are compared with those of new/new.
NEIGHBOURS = 10
# What finding the very item may lose as it is measured: few queries prove no loss.
_LOSS = 0.01


@dataclass(frozen=True)
class Row:
    """One line of the gate's table: how the old release's vectors would be served."""

    cell: CellName
    old: CellName
    # With float32 files alone, though some of the way has int8 twins.
    exact: bool
    map_gain: Difference
    cmc1_gain: Difference
    # Images that are asked for by texts.
    by_text: bool = False
    # Where no class is known: of agreement@10, beside figures of finding the very item.
    agreement_gain: Difference | None = None

    def __str__(self) -> str:
        exact, by_text = " float32" * self.exact, " by text" * self.by_text
        return f"{self.cell}{exact}{by_text}"

    @property
    def passed(self) -> bool:
        """Both lower bounds are above 0. Without classes: what is similar is found better, and the
        very item not worse, neither by more than a point nor measurably."""
        if self.agreement_gain is None:
            return self.map_gain.low > 0 and self.cmc1_gain.low > 0
        return self.finds_similar and self.keeps_items

    @property
    def finds_similar(self) -> bool:
        """Whether what is similar is found better."""
        return self.agreement_gain is not None and self.agreement_gain.low > 0

    @property
    def keeps_items(self) -> bool:
        """Whether the very item is found not worse, neither by more than a point nor measurably."""
        gains = (self.map_gain, self.cmc1_gain)
        return all(gain.mean >= -_LOSS and gain.high >= 0 for gain in gains)

    @property
    def finds_items(self) -> bool:
        """Whether the very item is found better, too."""
        return self.map_gain.low > 0 and self.cmc1_gain.low > 0


def gain(
    name: CellName, old: CellName, served: Measured, before: Measured, own: Measured | None,
    *, classes: Ints | None, exact: bool, by_text: bool,
) -> Row:  # fmt: skip
    """Compare a served cell with the old release.

    `own`: new/new, where agreement with it decides. `classes`: of each query, where they are known.
    """

    def gained(found: PerQuery, other: PerQuery) -> Difference:
        labels = None if classes is None else [classes]
        return paired_bootstrap([found], [other], classes=labels)

    agreement = None if own is None else gained(agrees(served, own), agrees(before, own))
    return Row(
        name, old, exact,
        gained(served.map, before.map), gained(served.cmc1, before.cmc1),
        by_text, agreement,
    )  # fmt: skip


def agrees(found: Measured, own: Measured) -> PerQuery:
    """The share of each query's first NEIGHBOURS hits that new/new has among its own."""
    pairs = zip(found.neighbours[:, :NEIGHBOURS], own.neighbours[:, :NEIGHBOURS], strict=True)
    return np.array([np.isin(a[a >= 0], b).sum() / max(1, (b >= 0).sum()) for a, b in pairs])


def verdict(
    published: Publication,
    rows: Sequence[Row],
    new: Manifest,
    unlabelled: Sequence[Unlabelled] = (),
) -> GateVerdict:
    """Of all rows; what it holds for. `unlabelled`: of the same ways by what needs no labels, which
    decide nothing where there are classes."""
    if not published.manifests:
        return GateVerdict(verdict="first")
    problems = []
    current = set(published.manifests) - published.withdrawn
    if current and max(current) not in {row.old.query for row in rows}:
        problems.append(
            f"vectors of release {max(current)} are served by no upgrade and no direct search"
        )
    if current and _texts_left_behind(published, max(current), new):
        problems.append(
            f"texts under release {max(current)} have no side-information, which every upgrade "
            "from it reads; add one that reads none"
        )
    beaten = [f"{row} does not beat {row.old}{_why(row)}" for row in rows if not row.passed]
    if beaten:
        problems.append(few(beaten))
    told = problems or [_holds_for(rows) or _holds_beside(unlabelled)]
    return GateVerdict(
        verdict="failed" if problems else "passed",
        map_gain_low=min((row.map_gain.low for row in rows), default=None),
        cmc1_gain_low=min((row.cmc1_gain.low for row in rows), default=None),
        detail="; ".join(filter(None, [*told, _of_these_classes(rows)])),
    )


def _of_these_classes(rows: Sequence[Row]) -> str:
    """Say that the verdict holds for no other classes, where they are too few to draw."""
    few_classes = [row.map_gain.classes or 0 for row in rows if row.map_gain.of_these_classes]
    if not few_classes:
        return ""
    return (
        f"decided for the {min(few_classes)} evaluated classes alone; "
        f"evaluate {FEWEST_CLASSES} or more to decide for others"
    )


def _texts_left_behind(published: Publication, newest: int, new: Manifest) -> bool:
    """Whether images are carried, and texts in the same galleries are not."""
    old = published.manifests[newest]
    if old.text_encoder is None or new.searches(old.space):
        return False
    usable = {n: one for n, one in published.manifests.items() if n not in published.withdrawn}
    usable[new.release] = new
    carried, texts = (
        plan_route(usable, newest, new.release, side) for side in (old.side_space, None)
    )
    return carried is not None and texts is None


def _why(row: Row) -> str:
    if row.agreement_gain is None:
        return ""
    if row.agreement_gain.low <= 0:
        return " in agreement@10 with new/new"
    return " at finding the very item (healing or embedding again does)"


def _holds_beside(told: Sequence[Unlabelled]) -> str:
    """For which kinds of search a verdict by classes holds; what is worst of each."""
    if not told:
        return ""
    similar = min(told, key=lambda one: one.agreement - one.stayed_agreement)
    item = min(told, key=lambda one: one.recall1 - one.stayed_recall1)
    agreement = f"{100 * similar.stayed_agreement:.1f} to {100 * similar.agreement:.1f}"
    recall = f"{100 * item.stayed_recall1:.1f} to {100 * item.recall1:.1f}"
    kinds = {
        f"similar things (agreement@10 {agreement} %)": all(one.similar for one in told),
        f"finding the very item (R@1 {recall} %)": all(one.very_item for one in told),
    }
    held = ["things of a class", *(kind for kind, holds in kinds.items() if holds)]
    missed = [kind for kind, holds in kinds.items() if not holds]
    return f"holds for {', '.join(held)}" + (f"; not for {', '.join(missed)}" if missed else "")


def _holds_for(rows: Sequence[Row]) -> str:
    """For which kind of search a verdict without classes holds."""
    known = [row for row in rows if row.agreement_gain is not None]
    if not known:
        return ""
    least = min(row.agreement_gain.low for row in known if row.agreement_gain is not None)
    similar = f"holds for similar things (agreement@10 {100 * least:+.1f} at least)"
    if all(row.finds_items for row in known):
        return f"{similar} and for finding the very item"
    return f"{similar}; the very item is found neither better nor worse, as far as these texts say"
