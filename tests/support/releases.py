"""Releases to publish in tests: real files, real manifests, orthogonal blocks (graphs.py)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nobackfill.digests import side_space_id
from nobackfill.release.manifest import (
    Calibration,
    GateVerdict,
    Manifest,
    Probes,
    PublishedEmbedder,
    PublishedFile,
    PublishedSideEncoder,
    QueryAdapter,
    RankFusionEvidence,
    RouteEvidence,
    Upgrade,
    adapter_path,
    embedder_path,
    probes_path,
    release_space_id,
    side_encoder_path,
    upgrade_int8_path,
    upgrade_path,
)
from nobackfill.release.models import open_adapter, open_embedder, open_side_encoder, open_upgrade
from nobackfill.release.publishing.draft import Draft, describe_file
from tests.support import graphs

# Whether an upgrade reads side-information, and what becomes of it.
Way = tuple[bool, Literal["maps", "carries", "drops"]]

CREATED = "2026-01-01T00:00:00+00:00"


def images(count: int, seed: int = 0) -> NDArray[np.uint8]:
    """Random pixels, uint8 [count,8,8,3]."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, graphs.SIZE, graphs.SIZE, 3), dtype=np.uint8)


def draft(
    folder: Path,
    number: int,
    sources: Sequence[Manifest] = (),
    *,
    directly: Sequence[Manifest] = (),
    adapts: Sequence[Manifest] = (),
    side: Literal["maps", "carries", "none"] = "maps",
    int8: bool = False,
    gate: GateVerdict | None = None,
    ways: Mapping[int, Way] | None = None,
    middle: float = graphs.MIDDLE,
    scale: tuple[float, float] | None = None,
    both: tuple[float, float, float] | None = None,
    calibrated: bool = True,
) -> Draft:
    """Release `number` with an upgrade from each of `sources`, its files below `folder`/NUMBER.

    `directly`: releases whose vectors it searches as they are, so it embeds into the first one's
    block. `adapts`: releases that it has a query adapter to. `side`: each release has its own side
    encoder and upgrades map into it; or it keeps the encoder of the first source; or there is none.
    `ways`: what the upgrade from a source does with side-information, where it is not that.
    `middle`: see graphs.encoder. `scale`: of carried vectors beside native ones; `both`: weights of
    both models. `calibrated`: with calibrations, as a measured release has.
    """
    folder = folder / str(number)
    files = {embedder_path(number): folder / embedder_path(number)}
    block = block_of(directly[0]) if directly else number
    weights = graphs.into_block(graphs.projection(graphs.BLOCK, 1), block)
    embedder = graphs.encoder("embedding", weights, unit=True, middle=middle)
    # Releases that share a block are still spaces of their own.
    embedder.doc_string = f"release {number}"
    graphs.save(embedder, files[embedder_path(number)])
    encoder = _side_encoder(folder, (number, block), sources, side, files)
    upgrades = tuple(
        _upgrade(
            folder, (number, block), s, (ways or {}).get(s.release, _way(s, side)), int8, files
        )
        for s in sources
    )
    published_embedder = PublishedEmbedder(
        file=published(folder, embedder_path(number)),
        height=graphs.SIZE,
        width=graphs.SIZE,
        dim=graphs.DIM,
        metric="squared_l2",
        unit=True,
    )
    space = release_space_id(published_embedder)
    adapters = tuple(_adapter(folder, (number, block), target, files) for target in adapts)
    manifest = Manifest(
        format=5 if adapters else 1,
        release=number,
        space=space,
        embedder=published_embedder,
        side_space=None if encoder is None else side_space_id(encoder.file.sha256),
        side_encoder=encoder,
        upgrades=upgrades,
        searches_directly=tuple(m.space for m in directly),
        adapters=adapters,
        routes=tuple(
            RouteEvidence(
                releases=(s.release, number), map=0.9, cmc1=0.9, kept=0.95, both=_both(both)
            )
            for s in sources
        ),
        calibration=(
            _calibration(space, sources, (*directly, *adapts), scale) if calibrated else ()
        ),
        gate=gate or GateVerdict(verdict="passed" if number > 1 else "first"),
        probes=Probes(
            file=PublishedFile(path=probes_path(number), sha256="0" * 64, length=1),
            tolerance=1e-4,
            int8_tolerance=0.1,
        ),
        method="block",
        recipe={"block": block},
        created=CREATED,
    )
    return _with_probes(folder, manifest, files, {s.release: block_of(s) for s in sources})


def _both(joint: tuple[float, float, float] | None) -> RankFusionEvidence | None:
    if joint is None:
        return None
    new, old, offset = joint
    return RankFusionEvidence(
        new=new, old=old, offset=offset, map=0.9, cmc1=0.9, map_gain_low=0, cmc1_gain_low=0
    )


def _way(source: Manifest, side: str) -> Way:
    if side == "none" or source.side_space is None:
        return False, "drops"
    return True, "carries" if side == "carries" else "maps"


def block_of(manifest: Manifest) -> int:
    """The block that a release of ours embeds into, counted from 1 as releases are."""
    block = manifest.recipe["block"]
    assert isinstance(block, int)
    return block


def published(folder: Path, path: str) -> PublishedFile:
    """The manifest's entry of a file."""
    return describe_file(path, folder / path)


def _side_encoder(
    folder: Path,
    target: tuple[int, int],
    sources: Sequence[Manifest],
    side: str,
    files: dict[str, Path],
) -> PublishedSideEncoder | None:
    if side == "none":
        return None
    if side == "carries" and sources:
        return sources[0].side_encoder
    number, block = target
    path = side_encoder_path(number)
    weights = graphs.into_block(graphs.projection(graphs.SIDE_BLOCK, 2), block)
    encoder = graphs.encoder("side", weights, unit=False)
    encoder.doc_string = f"release {number}"
    files[path] = graphs.save(encoder, folder / path)
    return PublishedSideEncoder(
        file=published(folder, path), dim=graphs.SIDE_DIM, origin_release=number
    )


def _upgrade(
    folder: Path,
    target: tuple[int, int],
    source: Manifest,
    way: Way,
    int8: bool,
    files: dict[str, Path],
) -> Upgrade:
    number, block = target
    reads, effect = way
    path = upgrade_path(source.release, number)
    proto = graphs.upgrade(block_of(source), block, reads_side=reads, maps_side=effect == "maps")
    files[path] = graphs.save(proto, folder / path)
    twin = None
    if int8:
        twin_path = upgrade_int8_path(source.release, number)
        files[twin_path] = graphs.quantise(folder / path, folder / twin_path)
        twin = published(folder, twin_path)
    return Upgrade(
        from_release=source.release,
        from_space=source.space,
        from_dim=graphs.DIM,
        from_side_space=source.side_space if reads else None,
        from_side_dim=graphs.SIDE_DIM if reads else 0,
        method="block",
        file=published(folder, path),
        int8_file=twin,
        side=effect,
        predicts_uncertainty=reads,
    )


def _adapter(
    folder: Path, source: tuple[int, int], target: Manifest, files: dict[str, Path]
) -> QueryAdapter:
    number, block = source
    path = adapter_path(number, target.release)
    files[path] = graphs.save(graphs.adapter(block, block_of(target)), folder / path)
    return QueryAdapter(
        to_release=target.release,
        to_space=target.space,
        to_dim=graphs.DIM,
        to_unit=True,
        method="block",
        file=published(folder, path),
    )


def _calibration(
    space: str,
    sources: Sequence[Manifest],
    directly: Sequence[Manifest],
    scale: tuple[float, float] | None,
) -> tuple[Calibration, ...]:
    curve = {"distances": (0.01, 2.0, 4.0), "probabilities": (1.0, 0.2, 0.0), "items": 100}
    native = Calibration(query_space=space, gallery_space=space, origin="native", **curve)
    upgraded = native.model_copy(update={"origin": "upgraded", "scale": scale})
    old = [
        Calibration(query_space=s.space, gallery_space=s.space, origin="old-model", **curve)
        for s in sources
    ]
    direct = [
        Calibration(query_space=space, gallery_space=m.space, origin="direct", **curve)
        for m in directly
    ]
    return (native, upgraded, *old, *direct)


def _with_probes(
    folder: Path, manifest: Manifest, files: dict[str, Path], blocks: dict[int, int]
) -> Draft:
    """Record what the models give as the golden probes; `blocks` are those of upgraded releases."""
    pixels = images(3, seed=99)
    arrays: dict[str, NDArray[Any]] = {"image": pixels}
    arrays["embedding"] = open_embedder(files, manifest).run(pixels)
    encoder = manifest.side_encoder
    if encoder is not None:
        held = files if encoder.file.path in files else folder.parent / str(encoder.origin_release)
        arrays["side"] = open_side_encoder(held, manifest).run(pixels)
    for upgrade in manifest.upgrades:
        name = f"upgrade_{upgrade.from_release}"
        block = blocks[upgrade.from_release]
        old = graphs.into_block(graphs.projection(graphs.BLOCK, 1), block)
        flat = pixels.reshape(len(pixels), -1).astype(np.float32) @ old
        embedding = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        arrays[f"{name}/embedding"] = embedding
        side = None
        if upgrade.reads_side:
            rng = np.random.default_rng(5)
            side = rng.standard_normal((len(pixels), graphs.SIDE_DIM)).astype(np.float32)
            arrays[f"{name}/side"] = side
        got = open_upgrade(files, manifest, upgrade).run(embedding, side)
        arrays[f"{name}/upgraded"] = got.embedding
        if upgrade.side == "maps" and got.side_information is not None:
            arrays[f"{name}/upgraded_side"] = got.side_information
    for adapter in manifest.adapters:
        name = f"adapter_{adapter.to_release}"
        arrays[f"{name}/embedding"] = arrays["embedding"]
        adapted = open_adapter(files, manifest, adapter).run(arrays["embedding"])
        arrays[f"{name}/adapted"] = adapted
    path = probes_path(manifest.release)
    with (folder / path).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    files[path] = folder / path
    probes = manifest.probes.model_copy(update={"file": published(folder, path)})
    return Draft(manifest.model_copy(update={"probes": probes}), files)
