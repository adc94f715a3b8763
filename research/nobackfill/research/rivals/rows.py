"""The rivals of a comparison by name."""

from collections.abc import Callable, Mapping

from nobackfill.research.rivals.drift_adapter import DriftAdapterRival
from nobackfill.research.rivals.local_adapters import LocalAdapters
from nobackfill.research.rivals.mini_vec2vec import MiniVec2Vec
from nobackfill.research.rivals.query_drift import QueryDrift
from nobackfill.research.rivals.rival import Rival
from nobackfill.research.rivals.trained import TrainedMap


def list_rivals(epochs: int = 30, inner_dim: int = 2048) -> Mapping[str, Callable[[], Rival]]:
    """Return a constructor of each rival by its name, in the order of the table; nothing is fitted.

    Args:
        epochs: passes over the training vectors, for trained maps, at least 1.
        inner_dim: width of their inner layers.

    Returns:
        The constructors; each call of one makes a new rival. A missing package is noticed by `fit`.
    """

    def trained(method: str, reads_side: bool, **options: float | bool) -> Callable[[], Rival]:
        return lambda: TrainedMap(
            method, reads_side=reads_side, options=options, epochs=epochs, inner_dim=inner_dim
        )

    return {
        "residual_side": trained("residual", True),
        "residual_side_three": trained("residual", True, members=3),
        "residual_side_distilled": trained("residual", True, members=3, distilled=True),
        "residual": trained("residual", False),
        "fct_side": trained("fct", True),
        "fct_raw_side": trained("fct", True, raw=True),
        "fct": trained("fct", False),
        "fastfill_side": trained("fastfill", True),
        "fastfill_joint_side": trained("fastfill", True, joint=True),
        "affine_side": trained("affine", True),
        "affine": trained("affine", False),
        "low_rank": trained("low_rank", False),
        "procrustes": trained("procrustes", False),
        "mini_vec2vec": MiniVec2Vec,
        "drift_adapter_procrustes": lambda: DriftAdapterRival("procrustes"),
        "drift_adapter_low_rank": lambda: DriftAdapterRival("low_rank"),
        "drift_adapter_residual": lambda: DriftAdapterRival("residual"),
        "local_adapters": LocalAdapters,
        "query_drift": QueryDrift,
    }
