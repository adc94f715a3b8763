"""New models that keep the independent one and meet the old space besides; ours on top of each."""

from typing import Any

from nobackfill.training.comparison.names import Name
from nobackfill.training.comparison.rows import Row, Shared

# Only linear layers are trained.
_TRAINING: dict[str, Any] = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.0}


def adapted(shared: Shared) -> list[Row]:
    """BT2, with a quarter more dimensions than the independent model's (the paper's 32 beside 128),
    and lambda-orthogonality: as they meet stored vectors, and with ours from old to adapted space.
    """
    dim = shared.place.preset.embedder["embedding_dim"]
    assert isinstance(dim, int)
    bt2 = shared.adapted(Name.BT2, "bt2", embedding_dim=dim + dim // 4, **_TRAINING)
    nearly = shared.adapted(Name.LAMBDA_ORTHOGONAL, "lambda_orthogonal", **_TRAINING)
    return [
        Row(Name.BT2, shared.old, bt2),
        shared.on_top(Name.BT2_RESIDUAL, bt2),
        Row(Name.LAMBDA_ORTHOGONAL, shared.old, nearly),
        shared.on_top(Name.LAMBDA_ORTHOGONAL_RESIDUAL, nearly),
    ]
