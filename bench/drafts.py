"""Drafts of the two releases: their models made, their files described and probed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import data
from bench.models import (
    ProjectedPixels,
    TorchvisionEncoder,
    build_transform,
    write_encoder,
    write_transform,
)
from nobackfill.digests import side_space_id
from nobackfill.release.manifest import (
    Calibration,
    GateVerdict,
    Manifest,
    Probes,
    PublishedEmbedder,
    PublishedFile,
    PublishedSideEncoder,
    RouteEvidence,
    Upgrade,
    embedder_path,
    probes_path,
    release_space_id,
    side_encoder_path,
    upgrade_int8_path,
    upgrade_path,
)
from nobackfill.release.models import open_embedder, open_side_encoder, open_upgrade
from nobackfill.release.publishing.draft import Draft, describe_file

CREATED = "2026-01-01T00:00:00+00:00"


def make_draft(
    folder: Path,
    number: int,
    sources: Sequence[Manifest],
    inner: int,
    backbone: str | None,
    size: int,
) -> Draft:
    """Release `number`, its upgrades from `sources` of inner width `inner`; see `publication`."""
    path = embedder_path(number)
    files = {path: folder / path}
    encoder = (
        ProjectedPixels(size, data.DIM, number, unit=True)
        if backbone is None
        else TorchvisionEncoder(backbone, data.DIM, number)
    )
    write_encoder(encoder, size, "embedding", files[path])
    embedder = PublishedEmbedder(
        file=describe_file(path, files[path]),
        height=size,
        width=size,
        dim=data.DIM,
        metric="squared_l2",
        unit=True,
    )
    space = release_space_id(embedder)
    side = sources[0].side_encoder if sources else _side_encoder(folder, number, size, files)
    assert side is not None
    upgrades = [_upgrade(folder, number, source, inner, files) for source in sources]
    routes = [
        RouteEvidence(releases=(s.release, number), map=0.9, cmc1=0.9, kept=0.97) for s in sources
    ]
    manifest = Manifest(
        release=number,
        space=space,
        embedder=embedder,
        side_space=side_space_id(side.file.sha256),
        side_encoder=side,
        upgrades=tuple(upgrades),
        routes=tuple(routes),
        calibration=_curves(space, sources),
        gate=GateVerdict(verdict="passed" if sources else "first"),
        probes=Probes(
            file=PublishedFile(path=probes_path(number), sha256="0" * 64, length=1),
            tolerance=1e-3,
            int8_tolerance=0.2,
        ),
        method="bench",
        created=CREATED,
    )
    return _probed(folder, manifest, files, size)


def _side_encoder(
    folder: Path, number: int, size: int, files: dict[str, Path]
) -> PublishedSideEncoder:
    path = side_encoder_path(number)
    files[path] = folder / path
    write_encoder(ProjectedPixels(size, data.SIDE_DIM, 99, unit=False), size, "side", files[path])
    return PublishedSideEncoder(
        file=describe_file(path, files[path]), dim=data.SIDE_DIM, origin_release=number
    )


def _upgrade(
    folder: Path, number: int, source: Manifest, inner: int, files: dict[str, Path]
) -> Upgrade:
    path = upgrade_path(source.release, number)
    twin = upgrade_int8_path(source.release, number)
    write_transform(build_transform(inner), folder / path)
    files |= {path: folder / path, twin: folder / twin}
    return Upgrade(
        from_release=source.release,
        from_space=source.space,
        from_dim=data.DIM,
        from_side_space=source.side_space,
        from_side_dim=data.SIDE_DIM,
        method="fct",
        file=describe_file(path, files[path]),
        int8_file=describe_file(twin, files[twin]),
        side="carries",
        predicts_uncertainty=False,
    )


def _curves(space: str, sources: Sequence[Manifest]) -> tuple[Calibration, ...]:
    curve = {"distances": (0.0, 2.0, 4.0), "probabilities": (1.0, 0.2, 0.0), "items": 100}
    pairs = [(space, "native"), (space, "upgraded")]
    pairs += [(source.space, "old-model") for source in sources]
    return tuple(
        Calibration(query_space=of, gallery_space=of, origin=origin, **curve)
        for of, origin in pairs
    )


def _probed(folder: Path, manifest: Manifest, files: dict[str, Path], size: int) -> Draft:
    pixels = data.draw_images(2, size)
    arrays: dict[str, NDArray[Any]] = {"image": pixels}
    arrays["embedding"] = open_embedder(folder, manifest).run(pixels)
    arrays["side"] = open_side_encoder(folder, manifest).run(pixels)
    some = data.draw_items(2, seed=3)
    for upgrade in manifest.upgrades:
        name = f"upgrade_{upgrade.from_release}"
        arrays |= {f"{name}/embedding": some.old, f"{name}/side": some.side}
        got = open_upgrade(folder, manifest, upgrade).run(some.old, some.side)
        arrays[f"{name}/upgraded"] = got.embedding
    path = probes_path(manifest.release)
    with (folder / path).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    files[path] = folder / path
    probes = manifest.probes.model_copy(update={"file": describe_file(path, files[path])})
    return Draft(manifest.model_copy(update={"probes": probes}), files)
