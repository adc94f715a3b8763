"""How the demo trains: the configurations of configs/digits, with this run's paths and sizes."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parent.parent / "configs" / "digits"
# Inputs up to this side are for the small network; larger ones get the small ResNet.
SMALL_SIDE = 32

# Keys of a configuration with their values.
Settings = dict[str, str | int]
# Trains a new model that searches old vectors as they are; compatibility weighs more than the
# paper's 1, so that a gate over few images can see it.
COMPATIBLE: Settings = {"method": "unibct", "options.weight": 3}


@dataclass(frozen=True)
class Recipe:
    """One training: a configuration file, and the keys set on the command line."""

    config: Path
    run: Path
    epochs: int
    settings: Settings

    def arguments(self) -> Iterator[str | Path]:
        """For `python training/train.py`."""
        yield self.config
        for key, value in self.settings.items():
            yield from ("--set", f"{key}={value}")


@dataclass(frozen=True)
class Recipes:
    """Recipes for one run of the demo. `epochs` None: as configured; `batch_size` None: likewise,
    or half of the images where they are fewer than two batches."""

    images: Path
    runs: Path
    image_size: int
    epochs: int | None
    batch_size: int | None
    seed: int
    # Release 2 shall search release 1's vectors as they are: train it backward-compatibly.
    compatible: bool

    def run(self, name: str) -> Path:
        return self.runs / name

    def networks(self, release: int, classes: int, images: int) -> list[Recipe]:
        """phi and psi of a release that knows the first `classes` classes, of so many images."""
        backbone = "small" if self.image_size <= SMALL_SIDE else "small_resnet"
        shape: Settings = {"classes": classes, "image_size": self.image_size, "backbone": backbone}
        # Another seed a release: a new model knows the old one only where it trains compatibly.
        seed = 10 * self.seed + release
        method: Settings = {}
        if self.compatible and release > 1:
            method = COMPATIBLE | {"old": str(self.run(f"embedder-{release - 1}"))}
        return [
            self._recipe(f"embedder-{release}", seed, images, shape | method),
            self._recipe(f"side_encoder-{release}", seed, images, shape),
        ]

    def upgrade(self, images: int) -> Recipe:
        """h, g and an uncertainty: release 1's vectors into release 2's space ."""
        sources = {
            "old": "embedder-1",
            "new": "embedder-2",
            "old_side": "side_encoder-1",
            "new_side": "side_encoder-2",
        }
        paths: Settings = {key: str(self.run(run)) for key, run in sources.items()}
        return self._recipe("upgrade-1-2", self.seed, images, paths)

    def _recipe(self, name: str, seed: int, images: int, settings: Settings) -> Recipe:
        config = CONFIGS / f"{name}.yaml"
        configured = yaml.safe_load(config.read_text(encoding="utf-8"))
        epochs = int(configured["epochs"])
        batch_size = self.batch_size or min(int(configured["batch_size"]), images // 2)
        common: Settings = {
            "run_dir": str(self.run(name)),
            "images": str(self.images),
            "seed": seed,
            "batch_size": batch_size,
        }
        if self.epochs is not None:
            epochs = self.epochs
            common |= {"epochs": epochs, "warmup_epochs": 0}
        return Recipe(config, self.run(name), epochs, common | settings)
