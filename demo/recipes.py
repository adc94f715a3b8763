"""How the demo trains: the configurations that `training/train.py` reads.

Chosen on the digits' training half alone; nothing here has seen a query.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One YAML file.
Recipe = dict[str, Any]


@dataclass(frozen=True)
class Recipes:
    """Recipes for one run of the demo; `epochs` is the embedders' number, others follow it."""

    images: Path
    runs: Path
    image_size: int
    epochs: int
    seed: int

    def _common(self, run: str, kind: str) -> Recipe:
        return {
            "kind": kind,
            "run_dir": str(self.runs / run),
            "images": str(self.images),
            "seed": self.seed,
            "threads": 1,
        }

    def _network(self, run: str, kind: str) -> Recipe:
        small = self.image_size <= 32
        return self._common(run, kind) | {
            "image_size": self.image_size,
            "backbone": "small" if small else "small_resnet",
            "width": 32 if small else 24,
            "batch_size": 64,
            "optimizer": "adam",
            "lr": 0.003,
            "warmup_epochs": min(1, self.epochs / 2),
        }

    def embedder(self, release: int, classes: int) -> Recipe:
        """phi: learns the first `classes` classes under a CosFace head."""
        return self._network(f"embedder-{release}", "embedder") | {
            "classes": classes,
            "embedding_dim": 64,
            "head": "cosface",
            "epochs": self.epochs,
            # Another seed a release: the new model knows nothing of the old one.
            "seed": self.seed + 100 * release,
            "augmentation": {"rotate_degrees": 10, "translate": 0.1, "scale": 0.1},
        }

    def side_encoder(self, release: int, classes: int) -> Recipe:
        """psi: SimCLR on the same images, for a future nobody knows yet."""
        return self._network(f"side-{release}", "side_encoder") | {
            "classes": classes,
            "side_info": "simclr",
            "side_info_dim": 64,
            "epochs": 2 * self.epochs,
            "seed": self.seed + 100 * release + 1,
            "augmentation": {
                "rotate_degrees": 10,
                "translate": 0.1,
                "scale": 0.2,
                "crop_area": 0.5,
                "brightness": 0.4,
                "contrast": 0.4,
            },
        }

    def upgrade(self) -> Recipe:
        """h and g: release 1's vectors and side-information into release 2's (FCT)."""
        return self._common("upgrade-1-2", "upgrade") | {
            "old": str(self.runs / "embedder-1"),
            "new": str(self.runs / "embedder-2"),
            "old_side": str(self.runs / "side-1"),
            "new_side": str(self.runs / "side-2"),
            "side": "maps",
            "inner_dim": 512,
            "batch_size": 128,
            "optimizer": "adam",
            "lr": 0.001,
            "warmup_epochs": min(1, self.epochs / 2),
            "epochs": 2 * self.epochs,
            "views": 8,
            "augmentation": {"rotate_degrees": 10, "translate": 0.1, "scale": 0.1},
        }
