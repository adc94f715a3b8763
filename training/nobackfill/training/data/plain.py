"""Pictures of a single colour: export.py says what an embedder makes of them."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Images
from nobackfill.errors import UnusableOutputError, few
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Embedder, open_embedder
from nobackfill.training.export.probe_images import probe_images
from nobackfill.vectors import Vectors

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "black": (0, 0, 0),
    "grey": (128, 128, 128),
    "white": (255, 255, 255),
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
}
# Of the distance between pictures of something.
_SAME = 1e-3


def plain_trouble(manifest: Manifest, files: Mapping[str, Path]) -> list[str]:
    """Sentences on colours without a vector, and on colours that are hardly told apart."""
    if manifest.embedder.file is None:
        return []
    embedder = open_embedder(files, manifest)
    size = (manifest.frame.height, manifest.frame.width)
    found: dict[str, Vectors] = {}
    without = []
    for name, colour in COLOURS.items():
        picture = np.broadcast_to(np.array(colour, np.uint8), (1, *size, 3))
        try:
            found[name] = embedder.run(np.ascontiguousarray(picture))[0]
        except UnusableOutputError:
            without.append(name)
    trouble = []
    if without:
        trouble.append(
            f"the embedder makes no vector (zero, or not finite) of pictures all {few(without)}; "
            "galleries and searches will refuse such pictures"
        )
    near = _SAME * _usual(embedder, probe_images(*size))
    same = [
        f"{a} and {b}"
        for a, b in combinations(found, 2)
        if float(np.linalg.norm(found[a] - found[b])) <= near
    ]
    if same:
        trouble.append(
            f"the embedder gives nearly equal vectors for plain pictures ({few(same)}); they will "
            "be found for one another"
        )
    return trouble


def _usual(embedder: Embedder, images: Images) -> float:
    """The median distance between pictures of something; 0 where those have no vectors."""
    try:
        vectors: NDArray[np.float32] = embedder.run(images)
    except UnusableOutputError:
        return 0.0
    return float(np.median([np.linalg.norm(a - b) for a, b in combinations(vectors, 2)]))
