"""Publish orthogonal-block releases (graphs.py, releases.py) into a real, signed folder.

Release n embeds into its own block of the vector, so any mixing of spaces shows as cosine 0, and a
self query through the right upgrade as distance 0. Up to graphs.BLOCKS releases have blocks of
their own. `images` gives pictures of the size that all of them read.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from nobackfill.release.manifest import GateVerdict, Manifest, parse_manifest
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.publish import publish
from tests.support import graphs, releases

Side = Literal["maps", "carries", "none"]


def publish_block_release(
    repo: Path,
    number: int,
    upgrades_from: Sequence[int] = (),
    *,
    directly: Sequence[int] = (),
    adapts: Sequence[int] = (),
    side: Side = "maps",
    int8: bool = False,
    gate: GateVerdict | None = None,
    middle: float = graphs.MIDDLE,
    scale: tuple[float, float] | None = None,
    both: tuple[float, float, float] | None = None,
    calibrated: bool = True,
) -> Manifest:
    """Publish release `number` with upgrades from published releases; keys lie beside `repo`.

    `directly`: releases whose vectors its queries may meet as they are (it shares the first one's
    block). `adapts`: releases that it has a query adapter to. `middle`, `scale`, `both`,
    `calibrated`: see releases.draft. What it is made of stays in `<repo>.drafts`.
    """
    draft = releases.draft(
        repo.with_name(f"{repo.name}.drafts"),
        number,
        [manifest(repo, source) for source in upgrades_from],
        directly=[manifest(repo, source) for source in directly],
        adapts=[manifest(repo, target) for target in adapts],
        side=side,
        int8=int8,
        gate=gate,
        middle=middle,
        scale=scale,
        both=both,
        calibrated=calibrated,
    )
    publish(repo, draft)
    return draft.manifest


def manifest(repo: Path, number: int) -> Manifest:
    """A published release's manifest."""
    return parse_manifest((repo / manifest_path(number)).read_bytes())


def png(pixels: NDArray[np.uint8]) -> bytes:
    """One image uint8 [H,W,3] as PNG bytes: what a client sends."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def write_pngs(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """`count` random images as files of a folder, in the order of releases.images(count, seed)."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{seed}-{row:04d}.png" for row in range(count)]
    for path, pixels in zip(paths, releases.images(count, seed), strict=True):
        path.write_bytes(png(pixels))
    return paths
