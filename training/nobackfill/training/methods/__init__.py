"""The registries of training methods, by the configuration's key `method`; one file per method.

`embedder_method` and `upgrade_method` look a name up. They raise ConfigurationError for an unknown
one, and list the known ones.

>>> from nobackfill.training.methods import UPGRADE_METHODS, upgrade_method
>>> upgrade_method("fct") is UPGRADE_METHODS["fct"]
True
"""

from typing import TypeVar

from nobackfill.errors import ConfigurationError
from nobackfill.training.method import EmbedderInputs, EmbedderMethod, UpgradeMethod
from nobackfill.training.methods.adapted import BT2, LAMBDA_ORTHOGONAL
from nobackfill.training.methods.baselines import CONTRASTIVE, FOCAL, L2, LWF, REGRESS
from nobackfill.training.methods.bct import BCT, BCT_KD, BCT_SYS
from nobackfill.training.methods.cheap_maps import AFFINE, LOW_RANK, PROCRUSTES
from nobackfill.training.methods.d_simplex import D_SIMPLEX
from nobackfill.training.methods.divergence import KL, REVERSED_KL
from nobackfill.training.methods.dmu import DMU
from nobackfill.training.methods.fastfill import FASTFILL
from nobackfill.training.methods.fct import FCT
from nobackfill.training.methods.lce import LCE
from nobackfill.training.methods.mixbct import MIXBCT
from nobackfill.training.methods.rbt import RBT
from nobackfill.training.methods.residual import RESIDUAL
from nobackfill.training.methods.soft_prototypes import SOFT_PROTOTYPES
from nobackfill.training.methods.unibct import UNIBCT
from nobackfill.training.networks.embedder import EmbedderObjective

T = TypeVar("T")


def _independent(inputs: EmbedderInputs) -> EmbedderObjective:
    return EmbedderObjective(inputs.config, len(inputs.class_names))


EMBEDDER_METHODS: dict[str, EmbedderMethod] = {
    "independent": EmbedderMethod(_independent),
    "l2": L2,
    "lwf": LWF,
    "bct": BCT,
    "bct_kd": BCT_KD,
    "bct_sys": BCT_SYS,
    "regress": REGRESS,
    "contrastive": CONTRASTIVE,
    "unibct": UNIBCT,
    "dmu": DMU,
    "focal": FOCAL,
    "mixbct": MIXBCT,
    "bt2": BT2,
    "lambda_orthogonal": LAMBDA_ORTHOGONAL,
    "d_simplex": D_SIMPLEX,
}
UPGRADE_METHODS: dict[str, UpgradeMethod] = {
    "fct": FCT,
    "kl": KL,
    "reversed_kl": REVERSED_KL,
    "lce": LCE,
    "rbt": RBT,
    "fastfill": FASTFILL,
    "residual": RESIDUAL,
    "procrustes": PROCRUSTES,
    "affine": AFFINE,
    "low_rank": LOW_RANK,
    "soft_prototypes": SOFT_PROTOTYPES,
}


def embedder_method(name: str) -> EmbedderMethod:
    """Return an embedder method by its name, a key of EMBEDDER_METHODS.

    Names are compared exactly.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known ones.
    """
    return _look_up(name, EMBEDDER_METHODS, "embedder")


def upgrade_method(name: str) -> UpgradeMethod:
    """Return an upgrade method by its name, a key of UPGRADE_METHODS.

    Names are compared exactly.

    Raises:
        ConfigurationError: the name is unknown; the message lists the known ones.
    """
    return _look_up(name, UPGRADE_METHODS, "upgrade")


def _look_up(name: str, methods: dict[str, T], kind: str) -> T:
    if name not in methods:
        raise ConfigurationError(
            f"the key method: unknown {kind} method {name!r}; expected one of "
            f"{', '.join(sorted(methods))}"
        )
    return methods[name]
