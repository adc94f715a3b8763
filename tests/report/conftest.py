from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.publish import publish
from tests.support import releases

CLASSES, EACH = 4, 6


@pytest.fixture(scope="module")
def model_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two published releases; the upgrade moves one block to the other, exactly."""
    folder = tmp_path_factory.mktemp("releases")
    first = releases.draft(folder / "drafts", 1)
    publish(folder / "repo", first)
    publish(folder / "repo", releases.draft(folder / "drafts", 2, [first.manifest]))
    return folder / "repo"


@pytest.fixture(scope="module")
def chain_repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three published releases, each with an int8 upgrade out of the one before."""
    folder = tmp_path_factory.mktemp("chain")
    manifests: list[Manifest] = []
    for number in (1, 2, 3):
        draft = releases.draft(folder / "drafts", number, manifests[-1:], int8=number > 1)
        publish(folder / "repo", draft)
        manifests.append(draft.manifest)
    return folder / "repo"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of 8 x 8 images: a pattern a class, and noise that confuses some of them."""
    folder = tmp_path_factory.mktemp("images")
    chance = np.random.default_rng(3)
    for label in "abcd"[:CLASSES]:
        pattern = chance.integers(0, 256, (8, 8, 3))
        (folder / label).mkdir()
        for number in range(EACH):
            noise = chance.normal(0, 140, (8, 8, 3))
            pixels = np.clip(pattern + noise, 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
    return folder
