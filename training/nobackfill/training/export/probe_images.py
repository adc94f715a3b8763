"""The pictures that models are probed with: made here, no real image leaves with a release."""

import numpy as np
import torch
import torch.nn.functional as F

from nobackfill.class_folders import Images

_PROBES = 8


def probe_images(height: int, width: int) -> Images:
    """Synthetic pictures uint8 [8,height,width,3]: smooth blots."""
    rng = np.random.default_rng(2026)
    coarse = rng.random((_PROBES, 3, 4, 4), dtype=np.float32)
    smooth = F.interpolate(
        torch.from_numpy(coarse), (height, width), mode="bicubic", align_corners=False
    )
    images: Images = (smooth.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
    return np.ascontiguousarray(images)
