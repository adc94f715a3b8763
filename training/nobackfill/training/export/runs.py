"""What is put into a release: training runs, a text model, a map, or the name of what is gone."""

from pathlib import Path
from typing import NamedTuple

from nobackfill.errors import ConfigurationError
from nobackfill.training.export.assembly import (
    add_embedder_run,
    add_forward_head,
    add_side_run,
    add_upgrade_run,
)
from nobackfill.training.export.drafting import Release
from nobackfill.training.export.onnx_upgrade import SUFFIX, add_onnx_upgrade
from nobackfill.training.export.public_embedder import can_be_public
from nobackfill.training.export.text_encoder import add_text_encoder


class Runs(NamedTuple):
    """What is exported into a release; an upgrade is a run's folder, or a map as ONNX."""

    embedder: Path | None
    text_encoder: Path | None
    query_encoder: Path | None
    side_encoder: Path | None
    upgrades: tuple[Path, ...]

    def trained(self) -> list[Path]:
        """Folders of trainings."""
        runs = (self.embedder, self.side_encoder, *self.upgrades)
        return [run for run in runs if run is not None and run.suffix != SUFFIX]


def check_models(
    runs: Runs, onnx: Path | None, weights: str | None, vectors_of: str | None
) -> None:
    """Raises ConfigurationError for models that cannot make one release, and for upgrades that are
    neither a run nor a map."""
    for one in runs.upgrades:
        if one.is_file() and one.suffix != SUFFIX:
            raise ConfigurationError(
                f"--upgrade {one}: expected a run's folder, or FILE{SUFFIX} as `nobackfill fit "
                "--onnx` writes it"
            )
    if weights is not None and not can_be_public(weights):
        raise ConfigurationError(
            f"--weights {weights}: expected timm:NAME.TAG, open_clip:NAME/TAG or "
            "torchvision:NAME/WEIGHTS; train.py takes other weights"
        )
    text = runs.text_encoder
    if runs.query_encoder is not None and text is None:
        raise ConfigurationError("--query-encoder FOLDER: expected --text-encoder FOLDER beside it")
    images = [one for one in (runs.embedder, onnx, weights) if one is not None]
    if len(images) > 1 or (vectors_of is None) == (not images and text is None):
        raise ConfigurationError(
            "expected either --embedder RUN, --onnx FILE or --weights NAME, with --text-encoder "
            "FOLDER or without; --text-encoder FOLDER alone; or --vectors-of NAME:DIM alone"
        )


def named_vectors(vectors_of: str) -> tuple[str, int]:
    """What made vectors, and their dimension. Raises ConfigurationError."""
    name, _, dim = vectors_of.rpartition(":")
    if not name or not dim.isdecimal() or not int(dim):
        raise ConfigurationError(
            f"--vectors-of: expected NAME:DIM, as in openai/text-embedding-ada-002:1536, got "
            f"{vectors_of!r}"
        )
    return name, int(dim)


def add_runs(draft: Release, runs: Runs, keep_side_encoder: bool) -> None:
    """Export every run, the embedder first: the others must fit it."""
    if runs.embedder is not None:
        add_embedder_run(draft, runs.embedder)
    if runs.text_encoder is not None:
        add_text_encoder(draft, runs.text_encoder, runs.query_encoder)
    if runs.side_encoder is not None:
        add_side_run(draft, runs.side_encoder)
    if keep_side_encoder:
        draft.keep_side_encoder()
    if runs.embedder is not None:
        add_forward_head(draft, runs.embedder)
    for run in runs.upgrades:
        add = add_onnx_upgrade if run.suffix == SUFFIX else add_upgrade_run
        add(draft, run)
