"""Releases that embed texts: block releases (releases.py) with a text encoder beside, or instead
of, the embedder of images; or with no model at all.

The word `w3` lies where image 3 of `releases.images(20)` does, in each release's own block: texts
find images, and images texts, and a vector that meets another space's is at cosine 0.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx

from nobackfill.release.manifest import (
    Manifest,
    TextEncoder,
    embedder_path,
    lowest_manifest_format,
    probes_path,
    query_encoder_path,
    release_space_id,
    text_encoder_path,
    tokenizer_path,
)
from nobackfill.release.models import open_embedder
from nobackfill.release.probes import make_text_probes
from nobackfill.release.publishing.declaration import Declaration
from nobackfill.release.publishing.draft import Draft
from nobackfill.release.text_models import open_text_encoder
from nobackfill.training.export.text_encoder import declare_output, text_graph
from tests.adopt.models import WORDS, text_model
from tests.support import graphs, releases

Reads = Literal["texts", "both", "nothing"]
# Words that lie where an image does.
PICTURED = 20


def draft(
    folder: Path,
    number: int,
    sources: Sequence[Manifest] = (),
    *,
    reads: Reads = "texts",
    directly: Sequence[Manifest] = (),
    asking: bool = False,
    splits: str | None = None,
    grows: str | None = None,
    **spec: Any,
) -> Draft:
    """As releases.draft without side-information; `spec` is said of the text encoder. `asking`: a
    model of their own reads queries, and takes the words w18 and w19 for one another. `splits`: a
    pattern that the tokenizer looks for first; `grows`: a sign that it takes for a million."""
    made = releases.draft(folder, number, sources, directly=directly, side="none")
    place, files = folder / str(number), dict(made.local_files)
    text = None
    if reads != "nothing":
        text = _encoder(place, made, number, files, spec, asking=asking, splits=splits, grows=grows)
    embedder = made.manifest.embedder
    if reads != "both":
        gone = {"file": None, "height": None, "width": None}
        name = {"vectors_of": f"model {number}"} if reads == "nothing" else {}
        embedder = embedder.model_copy(update=gone | name)
        del files[embedder_path(number)]
    space = release_space_id(embedder, text)
    update = {
        "format": lowest_manifest_format(embedder, text),
        "embedder": embedder,
        "text_encoder": text,
        "space": space,
        "calibration": tuple(
            one.model_copy(
                update={
                    key: space
                    for key in ("query_space", "gallery_space")
                    if getattr(one, key) == made.manifest.space
                }
            )
            for one in made.manifest.calibration
        ),
    }
    manifest = made.manifest.model_copy(update=update)
    return _probed(place, manifest, files)


def _encoder(
    place: Path, made: Draft, number: int, files: dict[str, Path], spec: dict[str, Any], *,
    asking: bool, splits: str | None, grows: str | None,
) -> TextEncoder:  # fmt: skip
    rng = np.random.default_rng(7)
    rows = rng.standard_normal((len(WORDS), graphs.BLOCK)).astype(np.float32)
    block = releases.block_of(made.manifest)
    start = (block - 1) * graphs.BLOCK
    pictured = open_embedder(made.local_files, made.manifest).run(releases.images(PICTURED))
    first = WORDS.index("w0")
    rows[first : first + PICTURED] = pictured[:, start : start + graphs.BLOCK]
    path, tokenizer = text_encoder_path(number), tokenizer_path(number)
    inputs = _graph(place, path, number, graphs.into_block(rows, block), files)
    if asking:
        rows[first + 18 : first + 20] = rows[first + 18 : first + 20][::-1].copy()
        query = query_encoder_path(number)
        _graph(place, query, number, graphs.into_block(rows, block), files)
        spec = {**spec, "query_file": releases.published(place, query)}
    files[tokenizer] = place / tokenizer
    said = json.loads((place / "text" / "tokenizer.json").read_bytes())
    if splits is not None:
        split = {"type": "Split", "pattern": {"Regex": splits}, "behavior": "Isolated"}
        both = [split | {"invert": False}, said["pre_tokenizer"]]
        said["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": both}
    if grows is not None:
        pattern = {"String": grows}
        said["normalizer"] = {"type": "Replace", "pattern": pattern, "content": "x" * 10**6}
    files[tokenizer].write_text(json.dumps(said))
    return TextEncoder.model_validate(
        {
            "file": releases.published(place, path),
            "tokenizer": releases.published(place, tokenizer),
            "inputs": inputs, "length": 64, "pooling": "mean", **spec,
        }
    )  # fmt: skip


def _graph(
    place: Path, path: str, number: int, table: np.ndarray, files: dict[str, Path]
) -> tuple[str, ...]:
    """Write the graph of such a table; its inputs."""
    model = onnx.load(text_model(place / "text", 0, table=table))
    inputs = text_graph(model, Declaration())
    declare_output(model, graphs.DIM)
    # Releases that share a block are still spaces of their own.
    model.doc_string = f"release {number}"
    files[path] = graphs.save(model, place / path)
    return inputs


def _probed(place: Path, manifest: Manifest, files: dict[str, Path]) -> Draft:
    """With golden probes of what there is."""
    probes = probes_path(manifest.release)
    arrays = dict(np.load(place / probes))
    if manifest.embedder.file is None:
        for name in ("image", "embedding"):
            del arrays[name]
    if manifest.text_encoder is not None:
        read = open_text_encoder(files, manifest).run
        arrays |= make_text_probes(["w1 w2", "w3", "w18", "something else"], read)
    with (place / probes).open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    described = manifest.probes.model_copy(update={"file": releases.published(place, probes)})
    return Draft(manifest.model_copy(update={"probes": described}), files)
