"""What a report stands on: bytes to download, digests, recipes and versions."""

import platform
from collections.abc import Mapping
from importlib.metadata import version

from nobackfill.release.evidence import Unlabelled
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.routes import route_along

# Beside the release's own files, the figures come from these.
SOFTWARE = ("nobackfill", "onnxruntime", "numpy", "pillow")


def downloads(
    manifests: Mapping[int, Manifest], old: int, release: int, route: tuple[int, ...]
) -> dict[str, int]:
    """Bytes by part that a device of release `old` downloads to follow `release`.

    As a device chooses: int8 transforms where they are published, the probes of every release on
    the way, nothing that `old` has brought already. Manifests and signatures come on top.
    """
    new = manifests[release]
    steps = route_along(manifests, route).steps
    transforms = [upgrade.int8_file or upgrade.file for _, upgrade in steps]
    side = [] if new.side_encoder is None else [new.side_encoder.file]
    parts: dict[str, list[PublishedFile]] = {
        "new model": [file for file in new.embedding_files() if file not in side],
        "side-information encoder": side,
        "transform": transforms,
        "probes": [manifests[number].probes.file for number in route[1:] or (release,)],
    }
    held = {file.path for file in manifests[old].files()}
    lengths = {
        part: sum(file.length for file in files if file.path not in held)
        for part, files in parts.items()
    }
    return {part: length for part, length in lengths.items() if length}


def facts(manifest: Manifest) -> list[tuple[str, str]]:
    """Version, method, digests and recipe of a release, as rows of name and value."""
    embedder = manifest.embedder
    rows = [
        ("release", str(manifest.release)),
        ("created", manifest.created),
        ("method", manifest.method),
        ("space", manifest.space),
        ("input", _input(manifest)),
        ("embedding", f"{embedder.dim} numbers, {embedder.metric.replace('_', ' ')}"),
        ("side-information", manifest.side_space or "none"),
        *((f"{cell.name} without labels", _unlabelled(cell)) for cell in manifest.unlabelled),
        *((f"sha256 of {file.path}", file.sha256) for file in manifest.files()),
        *((f"recipe: {key}", str(value)) for key, value in manifest.recipe.items()),
    ]
    return [(name, value) for name, value in rows if value]


def _unlabelled(cell: Unlabelled) -> str:
    figures = {
        "agreement@10 with new / new": (cell.agreement, cell.stayed_agreement),
        "R@1 of the very item": (cell.recall1, cell.stayed_recall1),
    }
    told = [
        f"{name} {100 * new:.1f} % (old / old {100 * old:.1f})"
        for name, (new, old) in figures.items()
    ]
    return f"{', '.join(told)}; of {cell.queries} second views"


def _input(manifest: Manifest) -> str:
    kinds = []
    if manifest.embedder.file is not None:
        frame = manifest.frame
        told = [f"{frame.width} x {frame.height} pixels", frame.fit, frame.interpolation]
        kinds.append(", ".join(one for one in told if one not in ("stretch", "bilinear")))
    if (text := manifest.text_encoder) is not None:
        kinds.append(f"{text.length} tokens of text")
    return ", ".join(kinds)


def software() -> str:
    """The versions that the figures were computed with, as one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in SOFTWARE)
    return f"{versions}, Python {platform.python_version()}"
