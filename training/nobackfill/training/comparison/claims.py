"""What the papers claim, judged on the rows of a comparison by the paired bootstrap.

A claim is that one figure is larger than another on the same queries of the same seeds. Verdicts:
holds (the whole interval above 0; for a claim of >=, none of it below), fails (the other side),
undecided; in JSON true, false, null.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nobackfill.metrics.bootstrap import Difference, Verdict, paired_bootstrap
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.domains import SHIFTS
from nobackfill.training.comparison.ranges import KNOWN, NEW

FIGURE = "map"
BACKWARD = (
    "l2",
    "lwf",
    "regress",
    "contrastive",
    "bct",
    "bct_kd",
    "bct_sys",
    "unibct_vanilla",
    "unibct_drop",
    "unibct",
    "focal",
    "dmu",
    "dmu_selective",
    "dmu_forward",
    "dmu_confidence",
    "dmu_regression",
    "dmu_sharp",
    "bct_wide",
    "bct_relu",
    "bct_softmax_to_cosine",
    "bct_chain",
    "dmu_chain",
)


@dataclass(frozen=True)
class Claim:
    """`better` > `worse`, each a (row, cell) whose average precision is compared query by query;
    `better` >= `worse` with `or_equal`.
    """

    text: str
    better: tuple[str, str]
    worse: tuple[str, str]
    or_equal: bool = False


@dataclass(frozen=True)
class Judged:
    """A claim with the difference that was found."""

    claim: Claim
    difference: Difference

    @property
    def verdict(self) -> Verdict:
        """Holds, fails or undecided."""
        if not self.claim.or_equal:
            return self.difference.verdict
        if self.difference.low >= 0:
            return "holds"
        return "fails" if self.difference.high < 0 else "undecided"


def _criterion(row: str) -> Claim:
    return Claim(f"{row} meets the criterion (BCT Eq. 2)", (row, "new/old"), (row, "old/old"))


SERVED = "new/served"
_SIDE, _OURS = ("fct_simclr", SERVED), ("residual_simclr", SERVED)
CLAIMS = (
    Claim(
        "independent models are incompatible",
        ("independent", "old/old"),
        ("independent", "new/old"),
    ),
    *(_criterion(row) for row in BACKWARD),
    Claim("BCT loses new/new", ("independent", "new/new"), ("bct", "new/new")),
    *(
        Claim(
            f"BCT loses new/new on {part} (FCT appendix C)",
            ("independent", f"new/new, {part}"),
            ("bct", f"new/new, {part}"),
        )
        for part in (KNOWN, NEW)
    ),
    Claim("DMU > BCT on new/new", ("dmu", "new/new"), ("bct", "new/new")),
    Claim("DMU > BCT on new/old, vectors as they are", ("dmu", "new/old"), ("bct", "new/old")),
    Claim("DMU's psi(old) > its raw old", ("dmu", SERVED), ("dmu", "new/old")),
    Claim(
        "DMU > BCT on new/new, two updates in a row",
        ("dmu_chain", "new/new"),
        ("bct_chain", "new/new"),
    ),
    Claim(
        "DMU > BCT as served, two updates in a row", ("dmu_chain", SERVED), ("bct_chain", SERVED)
    ),
    Claim("FCT with SimCLR > BCT", _SIDE, ("bct", "new/old")),
    Claim("FCT without side-information > BCT", ("fct_none", SERVED), ("bct", "new/old")),
    Claim("side-information > none", _SIDE, ("fct_none", SERVED)),
    Claim("SimCLR > alternate", _SIDE, ("fct_alternate", SERVED)),
    Claim("alternate > autoencoder", ("fct_alternate", SERVED), ("fct_autoencoder", SERVED)),
    Claim(
        "SimCLR on unlabelled new data > on old data",
        ("fct_simclr_unlabelled", SERVED),
        _SIDE,
    ),
    Claim("SimCLR with multi-crop > without", ("fct_multicrop", SERVED), _SIDE),
    Claim(
        "side-information > a doubled old embedding",
        _SIDE,
        ("fct_doubled", SERVED),
    ),
    Claim("direct >= two-hop", ("direct", SERVED), ("two_hop", SERVED), or_equal=True),
    Claim("two-hop with side-information > without", ("two_hop", SERVED), ("two_hop_none", SERVED)),
    Claim("squared L2 > KL", _SIDE, ("kl", SERVED)),
    Claim("KL > reversed KL", ("kl", SERVED), ("reversed_kl", SERVED)),
    Claim("FCT > LCE", _SIDE, ("lce", SERVED)),
    Claim("FCT > RBT, both without side-information", ("fct_none", SERVED), ("rbt", SERVED)),
    Claim("FCT > affine, both without side-information", ("fct_none", SERVED), ("affine", SERVED)),
    Claim("FCT > affine, both with SimCLR", _SIDE, ("affine_simclr", SERVED)),
    Claim("FCT > class centres alone", _SIDE, ("soft_prototypes_simclr", SERVED)),
    Claim("FastFill > FCT", ("fastfill_simclr", SERVED), _SIDE),
    Claim(
        "FastFill > FCT over the backfill curve (by uncertainty, at random)",
        ("fastfill_simclr", "backfill uncertainty"),
        ("fct_simclr", "backfill random"),
    ),
    Claim(
        "uncertainty > random order of backfill",
        ("fastfill_simclr", "backfill uncertainty"),
        ("fastfill_simclr", "backfill random"),
    ),
    Claim("ours > FastFill", _OURS, ("fastfill_simclr", SERVED)),
    Claim("ours > FCT", _OURS, _SIDE),
    Claim("FCT > FCT at a quarter of the width", _SIDE, ("fct_small", SERVED)),
    Claim("ours > ours at a quarter of the width", _OURS, ("residual_small", SERVED)),
    Claim("ours > ours without the listwise loss", _OURS, ("residual_no_listwise", SERVED)),
    Claim("cached views > one view", _OURS, ("residual_one_view", SERVED)),
    Claim("DMU first and ours on top > ours", ("dmu_residual", SERVED), _OURS),
    *(
        Claim(f"best held-out epoch > last, {row}", (best, SERVED), (row, SERVED))
        for row, best in (("fct_simclr", "fct_simclr_best"), ("residual_simclr", "residual_best"))
    ),
    *(
        Claim(f"new classes up-weighted > not, {row}", (upweighted, SERVED), (row, SERVED))
        for row, upweighted in (
            ("fct_none", "fct_none_upweighted"),
            ("fct_simclr", "fct_simclr_upweighted"),
            ("residual_none", "residual_none_upweighted"),
            ("residual_simclr", "residual_upweighted"),
        )
    ),
    Claim("as much side-information > a quarter", _SIDE, ("fct_side_quarter", SERVED)),
    Claim("twice the side-information > as much", ("fct_side_double", SERVED), _SIDE),
    Claim("side-information in floats > in bits", _SIDE, ("fct_binary_simclr", SERVED)),
    Claim(
        "four times the bits > once", ("fct_bits_fourfold", SERVED), ("fct_binary_simclr", SERVED)
    ),
    Claim("ours in int8 < in float32", _OURS, ("residual_int8", SERVED)),
    *(
        Claim(f"{text} > the old model", (row, SERVED), (row, "old/old"))
        for text, row in (
            ("five small updates with side-information", "long_chain:5"),
            ("five small updates without side-information", "long_chain_none:5"),
            ("FCT with SimCLR, disjoint objectives", "disjoint:fct_simclr"),
            *((f"FCT with SimCLR, {domain} images", f"{domain}:fct_simclr") for domain in SHIFTS),
        )
    ),
    Claim("direct > five small updates", _SIDE, ("long_chain:5", SERVED)),
    Claim(
        "five small updates with side-information > without",
        ("long_chain:5", SERVED),
        ("long_chain_none:5", SERVED),
    ),
    Claim(
        "side-information > none, disjoint objectives",
        ("disjoint:fct_simclr", SERVED),
        ("disjoint:fct_none", SERVED),
    ),
    *(
        Claim(
            f"{text}, {domain} images",
            (f"{domain}:{better}", SERVED),
            (f"{domain}:{worse}", SERVED),
        )
        for domain in SHIFTS
        for text, better, worse in (
            ("side-information > none", "fct_simclr", "fct_none"),
            ("SimCLR > alternate", "fct_simclr", "fct_alternate"),
            ("alternate > autoencoder", "fct_alternate", "fct_autoencoder"),
        )
    ),
    Claim("refined > vanilla prototypes", ("unibct", "new/old"), ("unibct_vanilla", "new/old")),
    Claim(
        "refined > vanilla prototypes at 20 % wrong labels",
        ("noisy_unibct", "new/old"),
        ("noisy_unibct_vanilla", "new/old"),
    ),
    *(
        Claim(
            f"refined > vanilla prototypes, {allocation}",
            (f"{allocation}:refined", "new/old"),
            (f"{allocation}:vanilla", "new/old"),
        )
        for allocation in ("extended-data", "open-data", "extended-class", "open-class")
    ),
    *(
        Claim(
            f"UniBCT meets the criterion, {allocation}",
            (f"{allocation}:refined", "new/old"),
            (f"{allocation}:refined", "old/old"),
        )
        for allocation in ("extended-data", "open-data", "extended-class", "open-class")
    ),
)


def judge(claims: Sequence[Claim], rows: Mapping[str, Sequence[Cells]]) -> dict[str, Judged]:
    """Each claim whose rows are there, by its text.

    `rows` holds a row's cells of each seed, the same seeds in the same order for all rows.
    """
    judged = {}
    for claim in claims:
        sides = []
        for row, cell in (claim.better, claim.worse):
            runs = [cells.by_query.get(cell) for cells in rows.get(row, ())]
            sides.append([run[FIGURE] for run in runs if run is not None])
        if sides[0] and len(sides[0]) == len(sides[1]):
            judged[claim.text] = Judged(claim, paired_bootstrap(sides[0], sides[1]))
    return judged
