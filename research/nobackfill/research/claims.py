"""The claims of the papers, and ours, about the rows of a comparison."""

from nobackfill.research.catalogue import BYTES, COMPATIBLE, DMU, OBJECTIVES, PAIRS, SIDE, VARIANTS
from nobackfill.research.cells import KNOWN_CLASSES, NEW_CLASSES
from nobackfill.research.images import SHIFTS
from nobackfill.research.rows import OURS, RowName, setting_row_name
from nobackfill.research.settings import DISJOINT, HOPS
from nobackfill.research.summary import Claim
from nobackfill.training.data.allocations import ALLOCATIONS

BACKWARD = (
    *(*COMPATIBLE, RowName.LWF_NEW_DATA, *DMU, *VARIANTS, RowName.BCT_CHAIN, RowName.DMU_CHAIN),
    *(RowName.BT2, RowName.LAMBDA_ORTHOGONAL, RowName.D_SIMPLEX),
)
# The row that serves best, so that rivals of BCT are compared with the best that BCT can do.
BCT = (RowName.BCT, RowName.BCT_KD, RowName.BCT_SYS)


def _criterion(row: str) -> Claim:
    return Claim(f"{row} meets the criterion (BCT Eq. 2)", (row, "new/old"), (row, "old/old"))


SERVED = "new/served"
# Allocations whose new training set differs from the old one.
_ALLOCATIONS = tuple(name for name in ALLOCATIONS if name != "identical-data")


def _claim(text: str, better: str, worse: str, cell: str = SERVED) -> Claim:
    return Claim(text, (better, cell), (worse, cell))


CLAIMS = (
    Claim(
        "independent models are incompatible",
        (RowName.INDEPENDENT, "old/old"),
        (RowName.INDEPENDENT, "new/old"),
    ),
    *(_criterion(row) for row in BACKWARD),
    _claim("BCT loses new/new", RowName.INDEPENDENT, RowName.BCT, "new/new"),
    *(
        _claim(
            f"BCT loses new/new on {part} (FCT appendix C)",
            RowName.INDEPENDENT,
            RowName.BCT,
            f"new/new, {part}",
        )
        for part in (KNOWN_CLASSES, NEW_CLASSES)
    ),
    *(
        _claim(
            f"DMU > BCT with synthesized classifiers on {cell}", RowName.DMU, RowName.BCT_SYS, cell
        )
        for cell in ("new/new", "new/old")
    ),
    *(
        Claim(
            f"{text}, {pair.replace('_', ' ')}",
            (setting_row_name(pair, better), better_cell),
            (setting_row_name(pair, worse), worse_cell),
        )
        for pair in PAIRS
        for text, better, better_cell, worse, worse_cell in (
            ("FCT > BCT", RowName.FCT_SIMCLR, SERVED, RowName.BCT_SYS, "new/old"),
            ("DMU as served > BCT", RowName.DMU, SERVED, RowName.BCT_SYS, "new/old"),
            ("ours > FCT", OURS, SERVED, RowName.FCT_SIMCLR, SERVED),
            ("ours > the old model", OURS, SERVED, OURS, "old/old"),
        )
    ),
    Claim("DMU's psi(old) > its raw old", (RowName.DMU, SERVED), (RowName.DMU, "new/old")),
    _claim(
        "DMU > BCT on new/new, two updates in a row",
        RowName.DMU_CHAIN,
        RowName.BCT_CHAIN,
        "new/new",
    ),
    _claim("DMU > BCT as served, two updates in a row", RowName.DMU_CHAIN, RowName.BCT_CHAIN),
    Claim("FCT with SimCLR > the strongest BCT", (RowName.FCT_SIMCLR, SERVED), (BCT, "new/old")),
    Claim(
        "FCT without side-information > the strongest BCT",
        (RowName.FCT_NONE, SERVED),
        (BCT, "new/old"),
    ),
    _claim("side-information > none", RowName.FCT_SIMCLR, RowName.FCT_NONE),
    _claim("SimCLR > alternate", RowName.FCT_SIMCLR, RowName.FCT_ALTERNATE),
    _claim("alternate > autoencoder", RowName.FCT_ALTERNATE, RowName.FCT_AUTOENCODER),
    _claim(
        "SimCLR on unlabelled new data > on old data",
        RowName.FCT_SIMCLR_UNLABELLED,
        RowName.FCT_SIMCLR,
    ),
    *(
        _claim(
            f"SimCLR > {rival} in {count} bytes, by an affine map",
            setting_row_name(SIDE, f"simclr_{count}"),
            setting_row_name(SIDE, f"{rival}_{count}"),
        )
        for count in BYTES
        for rival in OBJECTIVES
        if rival != "simclr"
    ),
    _claim("SimCLR with multi-crop > without", RowName.FCT_MULTICROP, RowName.FCT_SIMCLR),
    _claim("side-information > a doubled old embedding", RowName.FCT_SIMCLR, RowName.FCT_DOUBLED),
    Claim(
        "direct >= two-hop", (RowName.DIRECT, SERVED), (RowName.TWO_HOP, SERVED), allows_equal=True
    ),
    _claim("two-hop with side-information > without", RowName.TWO_HOP, RowName.TWO_HOP_NONE),
    _claim("squared L2 > KL", RowName.FCT_SIMCLR, RowName.KL),
    _claim("KL > reversed KL", RowName.KL, RowName.REVERSED_KL),
    _claim("FCT > LCE", RowName.FCT_SIMCLR, RowName.LCE),
    _claim("FCT > RBT, both without side-information", RowName.FCT_NONE, RowName.RBT),
    _claim("FCT > affine, both without side-information", RowName.FCT_NONE, RowName.AFFINE),
    _claim("FCT > affine, both with SimCLR", RowName.FCT_SIMCLR, RowName.AFFINE_SIMCLR),
    _claim("FCT > class centres alone", RowName.FCT_SIMCLR, RowName.SOFT_PROTOTYPES_SIMCLR),
    _claim("FastFill > FCT", RowName.FASTFILL_SIMCLR, RowName.FCT_SIMCLR),
    _claim(
        "FastFill with h and variance apart > trained jointly",
        RowName.FASTFILL_SIMCLR,
        RowName.FASTFILL_JOINT,
    ),
    *(
        Claim(f"joint recipe > {text}", (RowName.RESIDUAL_JOINT, SERVED), than)
        for text, than in (
            ("FCT with the same side-information", ("fct_inner_simclr", SERVED)),
            ("FastFill", (RowName.FASTFILL_SIMCLR, SERVED)),
            ("ours", (OURS, SERVED)),
            ("the old model", (RowName.RESIDUAL_JOINT, "old/old")),
        )
    ),
    Claim(
        "ours with inner features > the old model",
        (RowName.RESIDUAL_INNER, SERVED),
        (RowName.RESIDUAL_INNER, "old/old"),
    ),
    Claim(
        "FastFill > FCT over the backfill curve (by uncertainty, at random)",
        (RowName.FASTFILL_SIMCLR, "backfill uncertainty"),
        (RowName.FCT_SIMCLR, "backfill random"),
    ),
    *(
        Claim(
            f"{order} > {other} order of backfill, {text}",
            (row, f"backfill {order}"),
            (row, f"backfill {other}"),
        )
        for text, row in (
            ("FastFill", RowName.FASTFILL_SIMCLR),
            ("FastFill jointly", RowName.FASTFILL_JOINT),
            ("FastFill jointly without side-information", "fastfill_joint_none"),
            ("ours", OURS),
        )
        for order, other in (
            ("uncertainty", "random"),
            ("gain", "random"),
            ("gain", "uncertainty"),
        )
    ),
    *(
        Claim(
            f"scores by origin > distances, {order} order of backfill, {text}",
            (row, f"backfill {order}, calibrated"),
            (row, f"backfill {order}"),
        )
        for text, row in (("FastFill", RowName.FASTFILL_SIMCLR), ("ours", OURS))
        for order in ("random", "uncertainty", "gain")
    ),
    *(
        Claim(
            f"uncertainty > random order of backfill, both by scores of origin, {text}",
            (row, "backfill uncertainty, calibrated"),
            (row, "backfill random, calibrated"),
        )
        for text, row in (("FastFill", RowName.FASTFILL_SIMCLR), ("ours", OURS))
    ),
    _claim("ours > FastFill", OURS, RowName.FASTFILL_SIMCLR),
    _claim("ours > FCT", OURS, RowName.FCT_SIMCLR),
    _claim("ours > affine, both with SimCLR", OURS, RowName.AFFINE_SIMCLR),
    _claim("ours > affine without side-information", OURS, RowName.AFFINE),
    _claim("ours > FCT on the same views and steps", OURS, RowName.FCT_MIXED),
    _claim("ours > affine on the same views", OURS, RowName.AFFINE_MIXED),
    _claim("ours without labels > with", OURS, RowName.RESIDUAL_LABELLED),
    _claim("three networks > one, ours", RowName.RESIDUAL_THREE, OURS),
    _claim("the network's share chosen > the whole, ours", RowName.RESIDUAL_CHOSEN, OURS),
    _claim("inner features > SimCLR, ours", RowName.RESIDUAL_INNER, OURS),
    _claim(
        "a plain view beside a mixed one > mixed alone, ours", RowName.RESIDUAL_BOTH_VIEWS, OURS
    ),
    _claim(
        "a same-class term on plain views > none, ours",
        RowName.RESIDUAL_SAME_CLASS,
        RowName.RESIDUAL_BOTH_VIEWS,
    ),
    _claim("ours > class centres alone", OURS, RowName.SOFT_PROTOTYPES_SIMCLR),
    _claim("FCT > FCT at a quarter of the width", RowName.FCT_SIMCLR, RowName.FCT_SMALL),
    _claim("ours > ours at a quarter of the width", OURS, RowName.RESIDUAL_SMALL),
    _claim("ours > ours without the listwise loss", OURS, RowName.RESIDUAL_NO_LISTWISE),
    _claim("cached views > one view", OURS, RowName.RESIDUAL_ONE_VIEW),
    _claim("DMU first and ours on top > ours", RowName.DMU_RESIDUAL, OURS),
    _claim("BT2 first and ours on top > ours", RowName.BT2_RESIDUAL, OURS),
    _claim(
        "lambda-orthogonality first and ours on top > ours",
        RowName.LAMBDA_ORTHOGONAL_RESIDUAL,
        OURS,
    ),
    *(
        _claim(f"best held-out epoch > last, {row}", best, row)
        for row, best in (
            (RowName.FCT_SIMCLR, RowName.FCT_SIMCLR_BEST),
            (RowName.RESIDUAL_SIMCLR, RowName.RESIDUAL_BEST),
        )
    ),
    *(
        _claim(f"new classes up-weighted > not, {row}", upweighted, row)
        for row, upweighted in (
            (RowName.FCT_NONE, RowName.FCT_NONE_UPWEIGHTED),
            (RowName.FCT_SIMCLR, RowName.FCT_SIMCLR_UPWEIGHTED),
            (RowName.RESIDUAL_NONE, RowName.RESIDUAL_NONE_UPWEIGHTED),
            (RowName.RESIDUAL_SIMCLR, RowName.RESIDUAL_UPWEIGHTED),
        )
    ),
    _claim("as much side-information > a quarter", RowName.FCT_SIMCLR, RowName.FCT_SIDE_QUARTER),
    _claim("twice the side-information > as much", RowName.FCT_SIDE_DOUBLE, RowName.FCT_SIMCLR),
    _claim("side-information in floats > in bits", RowName.FCT_SIMCLR, RowName.FCT_BINARY_SIMCLR),
    _claim("four times the bits > once", RowName.FCT_BITS_FOURFOLD, RowName.FCT_BINARY_SIMCLR),
    _claim("ours in int8 < in float32", OURS, RowName.RESIDUAL_INT8),
    *(
        Claim(f"{text} > the old model", (row, SERVED), (row, "old/old"))
        for text, row in (
            (
                "five small updates with side-information",
                setting_row_name(RowName.LONG_CHAIN, HOPS),
            ),
            (
                "five small updates without side-information",
                setting_row_name(RowName.LONG_CHAIN_NONE, HOPS),
            ),
            (
                "FCT with SimCLR, disjoint objectives",
                setting_row_name(DISJOINT, RowName.FCT_SIMCLR),
            ),
            *(
                (f"FCT with SimCLR, {domain} images", setting_row_name(domain, RowName.FCT_SIMCLR))
                for domain in SHIFTS
            ),
        )
    ),
    _claim(
        "direct > five small updates",
        RowName.FCT_SIMCLR,
        setting_row_name(RowName.LONG_CHAIN, HOPS),
    ),
    _claim(
        "five small updates with side-information > without",
        setting_row_name(RowName.LONG_CHAIN, HOPS),
        setting_row_name(RowName.LONG_CHAIN_NONE, HOPS),
    ),
    _claim(
        "side-information > none, disjoint objectives",
        setting_row_name(DISJOINT, RowName.FCT_SIMCLR),
        setting_row_name(DISJOINT, RowName.FCT_NONE),
    ),
    *(
        _claim(
            f"{text}, {domain} images",
            setting_row_name(domain, better),
            setting_row_name(domain, worse),
        )
        for domain in SHIFTS
        for text, better, worse in (
            ("side-information > none", RowName.FCT_SIMCLR, RowName.FCT_NONE),
            ("SimCLR > alternate", RowName.FCT_SIMCLR, RowName.FCT_ALTERNATE),
            ("alternate > autoencoder", RowName.FCT_ALTERNATE, RowName.FCT_AUTOENCODER),
        )
    ),
    _claim("refined > vanilla prototypes", RowName.UNIBCT, RowName.UNIBCT_VANILLA, "new/old"),
    _claim(
        "refined > vanilla prototypes at 20 % wrong labels",
        RowName.NOISY_UNIBCT,
        RowName.NOISY_UNIBCT_VANILLA,
        "new/old",
    ),
    *(
        _claim(
            f"refined > vanilla prototypes, {allocation}",
            setting_row_name(allocation, RowName.REFINED),
            setting_row_name(allocation, RowName.VANILLA),
            "new/old",
        )
        for allocation in _ALLOCATIONS
    ),
    *(
        Claim(
            f"UniBCT meets the criterion, {allocation}",
            (setting_row_name(allocation, RowName.REFINED), "new/old"),
            (setting_row_name(allocation, RowName.REFINED), "old/old"),
        )
        for allocation in _ALLOCATIONS
    ),
)
