"""How the demo trains: the configurations of configs/digits, with this run's paths and sizes, and
what that costs."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

CONFIGS = Path(__file__).parent.parent / "configs" / "digits"
# Inputs up to this side are for the small network; larger ones get the small ResNet.
SMALL_SIDE = 32

# Sides of the models' input. The demo takes the largest that is no larger than the pictures and
# trains within `TRAINING_SECONDS`.
SIZES = (16, 24, 32, 48, 64)
TRAINING_SECONDS = 300.0
# Fewer epochs train nothing that passes a gate.
LEAST_EPOCHS = 8
# Augmentation, reading and checkpoints beside the network's own steps, measured on two cores.
_OVERHEAD = 1.5

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

    def seconds(self, old_images: int, new_images: int) -> float:
        """Estimate the time of all trainings, from one measured step of the network.

        Both networks of a release train side by side; the side-information encoder takes longer,
        since it sees each image twice.
        """
        seconds = measure_step_seconds(_backbone(self.image_size), self.image_size)
        epochs = self.epochs or _configured("side_encoder-2", "epochs")
        return _OVERHEAD * 2 * epochs * (old_images + new_images) * seconds

    def networks(self, release: int, classes: int, images: int) -> list[Recipe]:
        """phi and psi of a release that knows the first `classes` classes, of so many images."""
        shape: Settings = {
            "classes": classes,
            "image_size": self.image_size,
            "backbone": _backbone(self.image_size),
        }
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
        epochs = _configured(name, "epochs")
        batch_size = self.batch_size or min(_configured(name, "batch_size"), images // 2)
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


def choose_affordable(recipes: Recipes, old_images: int, new_images: int) -> tuple[Recipes, float]:
    """The largest input, and with the smallest one the most epochs, that train within
    TRAINING_SECONDS; with the estimate in seconds.

    `recipes.image_size` is the largest side that is tried. What even LEAST_EPOCHS of the smallest
    input exceed is taken as it is.
    """
    sizes = [size for size in SIZES if size <= recipes.image_size] or [recipes.image_size]
    for size in reversed(sizes):
        recipes = replace(recipes, image_size=size)
        seconds = recipes.seconds(old_images, new_images)
        if seconds <= TRAINING_SECONDS:
            return recipes, seconds
    configured = recipes.epochs or _configured("side_encoder-2", "epochs")
    epochs = min(configured, max(LEAST_EPOCHS, int(configured * TRAINING_SECONDS / seconds)))
    return replace(recipes, epochs=epochs), seconds * epochs / configured


def measure_step_seconds(backbone: str, image_size: int) -> float:
    """Measure one training step of a network on one core, in seconds an image."""
    import torch

    from nobackfill.training.networks.backbones import build_backbone

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        width = _configured("embedder-2", "width")
        network = build_backbone(
            backbone, 64, width=width, pooling="avg", last_nonlin=False, image_size=image_size
        )
        pixels = torch.rand(32, 3, image_size, image_size)
        times = []
        for _ in range(4):
            started = time.perf_counter()
            network(pixels).square().mean().backward()
            times.append(time.perf_counter() - started)
        return min(times) / len(pixels)
    finally:
        torch.set_num_threads(threads)


def _backbone(image_size: int) -> str:
    return "small" if image_size <= SMALL_SIDE else "small_resnet"


def _configured(name: str, key: str) -> int:
    return int(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text(encoding="utf-8"))[key])
