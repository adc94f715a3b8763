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
_SIDE, _OURS = (RowName.FCT_SIMCLR, SERVED), (OURS, SERVED)
CLAIMS = (
    Claim(
        "independent models are incompatible",
        (RowName.INDEPENDENT, "old/old"),
        (RowName.INDEPENDENT, "new/old"),
    ),
    *(_criterion(row) for row in BACKWARD),
    Claim("BCT loses new/new", (RowName.INDEPENDENT, "new/new"), (RowName.BCT, "new/new")),
    *(
        Claim(
            f"BCT loses new/new on {part} (FCT appendix C)",
            (RowName.INDEPENDENT, f"new/new, {part}"),
            (RowName.BCT, f"new/new, {part}"),
        )
        for part in (KNOWN_CLASSES, NEW_CLASSES)
    ),
    *(
        Claim(
            f"DMU > BCT with synthesized classifiers on {cell}",
            (RowName.DMU, cell),
            (RowName.BCT_SYS, cell),
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
    Claim(
        "DMU > BCT on new/new, two updates in a row",
        (RowName.DMU_CHAIN, "new/new"),
        (RowName.BCT_CHAIN, "new/new"),
    ),
    Claim(
        "DMU > BCT as served, two updates in a row",
        (RowName.DMU_CHAIN, SERVED),
        (RowName.BCT_CHAIN, SERVED),
    ),
    Claim("FCT with SimCLR > the strongest BCT", _SIDE, (BCT, "new/old")),
    Claim(
        "FCT without side-information > the strongest BCT",
        (RowName.FCT_NONE, SERVED),
        (BCT, "new/old"),
    ),
    Claim("side-information > none", _SIDE, (RowName.FCT_NONE, SERVED)),
    Claim("SimCLR > alternate", _SIDE, (RowName.FCT_ALTERNATE, SERVED)),
    Claim(
        "alternate > autoencoder",
        (RowName.FCT_ALTERNATE, SERVED),
        (RowName.FCT_AUTOENCODER, SERVED),
    ),
    Claim(
        "SimCLR on unlabelled new data > on old data",
        (RowName.FCT_SIMCLR_UNLABELLED, SERVED),
        _SIDE,
    ),
    *(
        Claim(
            f"SimCLR > {rival} in {count} bytes, by an affine map",
            (setting_row_name(SIDE, f"simclr_{count}"), SERVED),
            (setting_row_name(SIDE, f"{rival}_{count}"), SERVED),
        )
        for count in BYTES
        for rival in OBJECTIVES
        if rival != "simclr"
    ),
    Claim("SimCLR with multi-crop > without", (RowName.FCT_MULTICROP, SERVED), _SIDE),
    Claim(
        "side-information > a doubled old embedding",
        _SIDE,
        (RowName.FCT_DOUBLED, SERVED),
    ),
    Claim(
        "direct >= two-hop", (RowName.DIRECT, SERVED), (RowName.TWO_HOP, SERVED), allows_equal=True
    ),
    Claim(
        "two-hop with side-information > without",
        (RowName.TWO_HOP, SERVED),
        (RowName.TWO_HOP_NONE, SERVED),
    ),
    Claim("squared L2 > KL", _SIDE, (RowName.KL, SERVED)),
    Claim("KL > reversed KL", (RowName.KL, SERVED), (RowName.REVERSED_KL, SERVED)),
    Claim("FCT > LCE", _SIDE, (RowName.LCE, SERVED)),
    Claim(
        "FCT > RBT, both without side-information",
        (RowName.FCT_NONE, SERVED),
        (RowName.RBT, SERVED),
    ),
    Claim(
        "FCT > affine, both without side-information",
        (RowName.FCT_NONE, SERVED),
        (RowName.AFFINE, SERVED),
    ),
    Claim("FCT > affine, both with SimCLR", _SIDE, (RowName.AFFINE_SIMCLR, SERVED)),
    Claim("FCT > class centres alone", _SIDE, (RowName.SOFT_PROTOTYPES_SIMCLR, SERVED)),
    Claim("FastFill > FCT", (RowName.FASTFILL_SIMCLR, SERVED), _SIDE),
    Claim(
        "FastFill with h and variance apart > trained jointly",
        (RowName.FASTFILL_SIMCLR, SERVED),
        (RowName.FASTFILL_JOINT, SERVED),
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
    Claim("ours > FastFill", _OURS, (RowName.FASTFILL_SIMCLR, SERVED)),
    Claim("ours > FCT", _OURS, _SIDE),
    Claim("ours > affine, both with SimCLR", _OURS, (RowName.AFFINE_SIMCLR, SERVED)),
    Claim("ours > affine without side-information", _OURS, (RowName.AFFINE, SERVED)),
    Claim("ours > FCT on the same views and steps", _OURS, (RowName.FCT_MIXED, SERVED)),
    Claim("ours > affine on the same views", _OURS, (RowName.AFFINE_MIXED, SERVED)),
    Claim("ours without labels > with", _OURS, (RowName.RESIDUAL_LABELLED, SERVED)),
    Claim("three networks > one, ours", (RowName.RESIDUAL_THREE, SERVED), _OURS),
    Claim("the network's share chosen > the whole, ours", (RowName.RESIDUAL_CHOSEN, SERVED), _OURS),
    Claim("inner features > SimCLR, ours", (RowName.RESIDUAL_INNER, SERVED), _OURS),
    Claim(
        "a plain view beside a mixed one > mixed alone, ours",
        (RowName.RESIDUAL_BOTH_VIEWS, SERVED),
        _OURS,
    ),
    Claim(
        "a same-class term on plain views > none, ours",
        (RowName.RESIDUAL_SAME_CLASS, SERVED),
        (RowName.RESIDUAL_BOTH_VIEWS, SERVED),
    ),
    Claim("ours > class centres alone", _OURS, (RowName.SOFT_PROTOTYPES_SIMCLR, SERVED)),
    Claim("FCT > FCT at a quarter of the width", _SIDE, (RowName.FCT_SMALL, SERVED)),
    Claim("ours > ours at a quarter of the width", _OURS, (RowName.RESIDUAL_SMALL, SERVED)),
    Claim("ours > ours without the listwise loss", _OURS, (RowName.RESIDUAL_NO_LISTWISE, SERVED)),
    Claim("cached views > one view", _OURS, (RowName.RESIDUAL_ONE_VIEW, SERVED)),
    Claim("DMU first and ours on top > ours", (RowName.DMU_RESIDUAL, SERVED), _OURS),
    Claim("BT2 first and ours on top > ours", (RowName.BT2_RESIDUAL, SERVED), _OURS),
    Claim(
        "lambda-orthogonality first and ours on top > ours",
        (RowName.LAMBDA_ORTHOGONAL_RESIDUAL, SERVED),
        _OURS,
    ),
    *(
        Claim(f"best held-out epoch > last, {row}", (best, SERVED), (row, SERVED))
        for row, best in (
            (RowName.FCT_SIMCLR, RowName.FCT_SIMCLR_BEST),
            (RowName.RESIDUAL_SIMCLR, RowName.RESIDUAL_BEST),
        )
    ),
    *(
        Claim(f"new classes up-weighted > not, {row}", (upweighted, SERVED), (row, SERVED))
        for row, upweighted in (
            (RowName.FCT_NONE, RowName.FCT_NONE_UPWEIGHTED),
            (RowName.FCT_SIMCLR, RowName.FCT_SIMCLR_UPWEIGHTED),
            (RowName.RESIDUAL_NONE, RowName.RESIDUAL_NONE_UPWEIGHTED),
            (RowName.RESIDUAL_SIMCLR, RowName.RESIDUAL_UPWEIGHTED),
        )
    ),
    Claim("as much side-information > a quarter", _SIDE, (RowName.FCT_SIDE_QUARTER, SERVED)),
    Claim("twice the side-information > as much", (RowName.FCT_SIDE_DOUBLE, SERVED), _SIDE),
    Claim("side-information in floats > in bits", _SIDE, (RowName.FCT_BINARY_SIMCLR, SERVED)),
    Claim(
        "four times the bits > once",
        (RowName.FCT_BITS_FOURFOLD, SERVED),
        (RowName.FCT_BINARY_SIMCLR, SERVED),
    ),
    Claim("ours in int8 < in float32", _OURS, (RowName.RESIDUAL_INT8, SERVED)),
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
    Claim(
        "direct > five small updates", _SIDE, (setting_row_name(RowName.LONG_CHAIN, HOPS), SERVED)
    ),
    Claim(
        "five small updates with side-information > without",
        (setting_row_name(RowName.LONG_CHAIN, HOPS), SERVED),
        (setting_row_name(RowName.LONG_CHAIN_NONE, HOPS), SERVED),
    ),
    Claim(
        "side-information > none, disjoint objectives",
        (setting_row_name(DISJOINT, RowName.FCT_SIMCLR), SERVED),
        (setting_row_name(DISJOINT, RowName.FCT_NONE), SERVED),
    ),
    *(
        Claim(
            f"{text}, {domain} images",
            (setting_row_name(domain, better), SERVED),
            (setting_row_name(domain, worse), SERVED),
        )
        for domain in SHIFTS
        for text, better, worse in (
            ("side-information > none", RowName.FCT_SIMCLR, RowName.FCT_NONE),
            ("SimCLR > alternate", RowName.FCT_SIMCLR, RowName.FCT_ALTERNATE),
            ("alternate > autoencoder", RowName.FCT_ALTERNATE, RowName.FCT_AUTOENCODER),
        )
    ),
    Claim(
        "refined > vanilla prototypes",
        (RowName.UNIBCT, "new/old"),
        (RowName.UNIBCT_VANILLA, "new/old"),
    ),
    Claim(
        "refined > vanilla prototypes at 20 % wrong labels",
        (RowName.NOISY_UNIBCT, "new/old"),
        (RowName.NOISY_UNIBCT_VANILLA, "new/old"),
    ),
    *(
        Claim(
            f"refined > vanilla prototypes, {allocation}",
            (setting_row_name(allocation, RowName.REFINED), "new/old"),
            (setting_row_name(allocation, RowName.VANILLA), "new/old"),
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
