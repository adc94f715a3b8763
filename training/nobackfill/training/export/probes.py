"""Golden probes, which every installation recomputes, and a check on single-coloured pictures."""

from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.class_folders import Images
from nobackfill.errors import UnusableOutputError, join_few
from nobackfill.release.manifest import Manifest, Probes, PublishedFile, probes_path
from nobackfill.release.models import (
    ImageEmbedder,
    open_adapter,
    open_embedder,
    open_side_encoder,
    open_upgrade,
)
from nobackfill.release.probes import make_text_probes
from nobackfill.release.text_models import open_text_encoder
from nobackfill.training.export.drafting import ReleaseDraft, probe_images
from nobackfill.vectors import Vectors

# Written for this purpose: no real text is published with a release.
PROBE_TEXTS = (
    "a red bicycle leans on a wall",
    "How do I carry vectors into another model's space?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "2026-11-22 10:00 meeting, room 4.12: budget +3.5 %",
    "def add(a: int, b: int) -> int: return a + b",
    "天気がいいから、散歩しましょう。",
    "one " * 600,
    "!",
)


# Relative to max(1, |expected|): the difference of float32 arithmetic between machines.
TOLERANCE = 1e-3
# Number of random vectors for a space without a published model.
_DRAWN = 8


def make_probes(release: ReleaseDraft) -> Probes:
    """Run every model of the release on the probes, and write `probes-N.npz`.

    Every installation computes the same outputs again and compares them within the tolerance. An
    existing file is replaced. Models run one after another on the CPU.

    Args:
        release: the release with all its models; the file is added to it.

    Returns:
        The file's entry in the manifest. The tolerance of int8 files is three times their largest
        error here, between 0.05 and 10.

    Raises:
        VerificationError: a model cannot be loaded, or returns zero vectors, NaN or infinity
            (UnusableOutputError).
        ValidationError: the parts of the release contradict each other; it is pydantic's.
        KeyError: an upgrade, or `searches_directly`, names a release that is not published.
        AssertionError: the release has no embedder.
        ConfigurationError: the release embeds texts, and the extra `text` is not installed.
        OSError: the file cannot be written; a part of it may stay.
    """
    placeholder = Probes(
        file=PublishedFile(path=probes_path(release.number), sha256="0" * 64, length=1),
        tolerance=TOLERANCE,
        int8_tolerance=1.0,
    )
    manifest, files = release.manifest(placeholder), release.all_files()
    arrays: dict[str, NDArray[Any]] = {}
    if manifest.embedder.file is not None:
        images = probe_images(manifest.frame.height, manifest.frame.width)
        arrays |= {"image": images, "embedding": open_embedder(files, manifest).run(images)}
        if manifest.side_encoder is not None:
            arrays["side"] = open_side_encoder(files, manifest).run(images)
    if manifest.text_encoder is not None:
        arrays |= make_text_probes(PROBE_TEXTS, open_text_encoder(files, manifest).run)
    widest = 0.0
    for upgrade in manifest.upgrades:
        source = release.older_manifests[upgrade.from_release]
        embedding, side = source_probes(source, files)
        name = f"upgrade_{upgrade.from_release}"
        result = open_upgrade(files, manifest, upgrade).run(embedding, side)
        arrays[f"{name}/embedding"] = embedding
        arrays[f"{name}/upgraded"] = result.embedding
        if upgrade.reads_side and side is not None:
            arrays[f"{name}/side"] = side
        if upgrade.side == "maps" and result.side_information is not None:
            arrays[f"{name}/upgraded_side"] = result.side_information
        if upgrade.int8_file is not None:
            small = open_upgrade(files, manifest, upgrade, int8=True).run(embedding, side)
            for a, b in (
                (small.embedding, result.embedding),
                (small.side_information, result.side_information),
            ):
                if a is not None and b is not None:
                    widest = max(widest, float((np.abs(a - b) / np.maximum(1, np.abs(b))).max()))
    for adapter in manifest.adapters:
        queries, _ = source_probes(manifest, files)
        name = f"adapter_{adapter.to_release}"
        arrays[f"{name}/embedding"] = queries
        arrays[f"{name}/adapted"] = open_adapter(files, manifest, adapter).run(queries)
    path = release.add_file(probes_path(release.number))
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    # Rounding of quantised kernels differs between machines, by less than their error.
    return Probes(
        file=release.published_file(probes_path(release.number)),
        tolerance=TOLERANCE,
        int8_tolerance=min(10.0, max(0.05, 3 * widest)),
    )


def source_probes(
    source: Manifest, files: Mapping[str, Path]
) -> tuple[NDArray[np.float32], NDArray[np.float32] | None]:
    """Compute the embeddings and side-information of the probes by a release.

    The probes are images, texts if the release embeds no images, or random unit vectors if it has
    no model. The vectors are the same on every call. Models are loaded each time.

    Args:
        source: the release.
        files: local files by published path.

    Returns:
        Embeddings float32 [8,dim], and side-information float32 [8,side_dim], None without an
        encoder.

    Raises:
        VerificationError: a file is missing in `files`, cannot be read or is damaged, or a model
            cannot be run or returns unusable vectors (UnusableOutputError).
        ConfigurationError: the release embeds texts, and the extra `text` is not installed.
    """
    spec = source.embedder
    if spec.file is None and source.text_encoder is not None:
        return open_text_encoder(files, source).run(PROBE_TEXTS, "document"), None
    if spec.file is None:
        drawn = np.random.default_rng(2026).standard_normal((_DRAWN, spec.dim)).astype(np.float32)
        return (drawn / np.linalg.norm(drawn, axis=1, keepdims=True)), None
    images = probe_images(source.frame.height, source.frame.width)
    side = open_side_encoder(files, source).run(images) if source.side_encoder else None
    return open_embedder(files, source).run(images), side


COLOURS: Mapping[str, tuple[int, int, int]] = {
    "black": (0, 0, 0),
    "grey": (128, 128, 128),
    "white": (255, 255, 255),
    "red": (255, 0, 0),
    "green": (0, 255, 0),
    "blue": (0, 0, 255),
}
# Relative to the distance between pictures with content.
_SAME = 1e-3


def single_colour_warnings(manifest: Manifest, files: Mapping[str, Path]) -> list[str]:
    """Describe single-coloured pictures without a vector, or with nearly equal vectors.

    Nothing is printed. Six pictures are embedded: black, grey, white, red, green and blue. Vectors
    are nearly equal if they differ by at most 0.1 % of the median distance between the probe
    pictures.

    Args:
        manifest: the release.
        files: local files by published path.

    Returns:
        At most two sentences; none if all is well, or if the release embeds no images.

    Raises:
        VerificationError: the embedder's file is damaged, or onnxruntime cannot run it.
    """
    if manifest.embedder.file is None:
        return []
    embedder = open_embedder(files, manifest)
    size = (manifest.frame.height, manifest.frame.width)
    vector_of: dict[str, Vectors] = {}
    without_vector = []
    for name, colour in COLOURS.items():
        picture = np.broadcast_to(np.array(colour, np.uint8), (1, *size, 3))
        try:
            vector_of[name] = embedder.run(np.ascontiguousarray(picture))[0]
        except UnusableOutputError:
            without_vector.append(name)
    warnings = []
    if without_vector:
        warnings.append(
            "the embedder returns a zero vector, NaN or infinity for pictures of one colour "
            f"({join_few(without_vector)}); galleries and searches will refuse such pictures"
        )
    near = _SAME * _usual(embedder, probe_images(*size))
    same = [
        f"{a} and {b}"
        for a, b in combinations(vector_of, 2)
        if float(np.linalg.norm(vector_of[a] - vector_of[b])) <= near
    ]
    if same:
        warnings.append(
            "the embedder returns nearly equal vectors for pictures of different single colours "
            f"({join_few(same)}); searches cannot tell them apart"
        )
    return warnings


def _usual(embedder: ImageEmbedder, images: Images) -> float:
    """Return the median distance between pictures with content; 0 if they have no vectors."""
    try:
        vectors: NDArray[np.float32] = embedder.run(images)
    except UnusableOutputError:
        return 0.0
    return float(np.median([np.linalg.norm(a - b) for a, b in combinations(vectors, 2)]))
