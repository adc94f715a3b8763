"""Names of the rows that claims and groups pick: spelled here, given by the catalogue."""

from enum import StrEnum, auto


class Name(StrEnum):
    """A row's name in the table is its member's, in small letters."""

    INDEPENDENT = auto()
    BCT = auto()
    BCT_KD = auto()
    UNIBCT_VANILLA = auto()
    UNIBCT = auto()
    BCT_SYS = auto()
    DMU = auto()
    LWF_NEW_DATA = auto()
    BCT_WIDE = auto()
    BCT_RELU = auto()
    BCT_SOFTMAX_TO_COSINE = auto()
    BCT_CHAIN = auto()
    DMU_CHAIN = auto()
    AFFINE = auto()
    AFFINE_SIMCLR = auto()
    SOFT_PROTOTYPES_SIMCLR = auto()
    FCT_NONE = auto()
    FCT_AUTOENCODER = auto()
    FCT_ALTERNATE = auto()
    FCT_MIXUP = auto()
    FCT_SIMCLR = auto()
    FCT_BINARY_SIMCLR = auto()
    FCT_SIMCLR_UNLABELLED = auto()
    FCT_MULTICROP = auto()
    FCT_SIDE_ONLY = auto()
    FCT_DOUBLED = auto()
    FCT_SMALL = auto()
    FCT_SIDE_QUARTER = auto()
    FCT_SIDE_DOUBLE = auto()
    FCT_BITS_FOURFOLD = auto()
    FCT_SIMCLR_BEST = auto()
    FCT_NONE_UPWEIGHTED = auto()
    FCT_SIMCLR_UPWEIGHTED = auto()
    KL = auto()
    REVERSED_KL = auto()
    LCE = auto()
    RBT = auto()
    FASTFILL_SIMCLR = auto()
    FASTFILL_JOINT = auto()
    RESIDUAL_NONE = auto()
    RESIDUAL_SIMCLR = auto()
    RESIDUAL_INT8 = auto()
    RESIDUAL_SMALL = auto()
    RESIDUAL_NO_LISTWISE = auto()
    RESIDUAL_ONE_VIEW = auto()
    RESIDUAL_BEST = auto()
    RESIDUAL_LABELLED = auto()
    RESIDUAL_THREE = auto()
    RESIDUAL_CHOSEN = auto()
    FCT_MIXED = auto()
    AFFINE_MIXED = auto()
    RESIDUAL_NONE_UPWEIGHTED = auto()
    RESIDUAL_UPWEIGHTED = auto()
    DMU_RESIDUAL = auto()
    BT2 = auto()
    BT2_RESIDUAL = auto()
    LAMBDA_ORTHOGONAL = auto()
    LAMBDA_ORTHOGONAL_RESIDUAL = auto()
    DIRECT = auto()
    TWO_HOP = auto()
    TWO_HOP_NONE = auto()
    NOISY_UNIBCT = auto()
    NOISY_UNIBCT_VANILLA = auto()
    LONG_CHAIN = auto()
    LONG_CHAIN_NONE = auto()
    # Of UniBCT's allocations.
    VANILLA = auto()
    REFINED = auto()


# The default recipe.
OURS = Name.RESIDUAL_SIMCLR


def within(setting: str, row: str | int) -> str:
    """The name of a row in another domain, allocation or length of a chain."""
    return f"{setting}:{row}"
