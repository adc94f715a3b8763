"""Backbones, heads, transformations, and frozen models.

>>> import torch
>>> from nobackfill.training.networks import build_backbone
>>> small = build_backbone(
...     "small", 64, width=8, pooling="avg", last_nonlin=False, image_size=16
... )
>>> small(torch.zeros(2, 3, 16, 16)).shape
torch.Size([2, 64])
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.training.networks.backbones import (
        backbone_names as backbone_names,
        build_backbone as build_backbone,
    )
    from nobackfill.training.networks.embedder import (
        Binarise as Binarise,
        EmbedderObjective as EmbedderObjective,
        ImageEncoder as ImageEncoder,
        build_encoder as build_encoder,
    )
    from nobackfill.training.networks.frozen import (
        FrozenEncoder as FrozenEncoder,
        load_encoder as load_encoder,
    )
    from nobackfill.training.networks.heads import (
        Head as Head,
        build_head as build_head,
    )
    from nobackfill.training.networks.maps import AffineMap as AffineMap
    from nobackfill.training.networks.transform import (
        FctTransform as FctTransform,
        UpgradeNetwork as UpgradeNetwork,
        UpgradeOutput as UpgradeOutput,
    )
else:
    __getattr__ = export_lazily(__name__)
