"""d-Simplex: models that never saw each other search each other's vectors."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.method import CPU, Classifier
from nobackfill.training.methods import embedder_method
from nobackfill.training.methods.compatible import encode_images
from tests.training.methods import tiny

SIMPLEX: dict[str, object] = {"head": "simplex", "margin": None}


def searched(folder: Path, head: dict[str, object], method: str, old: Classifier) -> float:
    """Share of images of old classes whose nearest other image in the old space has their class.

    The query model learns all classes, without the old model and from other weights."""
    inputs = tiny.inputs(folder, None, seed=7, epochs=12, method=method, **head)
    torch.manual_seed(7)
    objective = embedder_method(method).make_objective(inputs)
    train_objective(
        objective, tiny.rows(), inputs.config, tiny.NAMES, progress=ProgressBars(visible=False)
    )
    labels = inputs.labels
    known = labels < len(old.class_names)
    queries = encode_images(objective.embedder, inputs.images[known], CPU)
    gallery = encode_images(old.encoder, inputs.images[known], CPU)
    cosines = F.normalize(queries) @ F.normalize(gallery).t()
    nearest = cosines.fill_diagonal_(-2).argmax(1)
    return float((labels[known][nearest] == labels[known]).float().mean())


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    """An old model of three classes under a simplex. Read only."""
    return tiny.old_model(tmp_path_factory.mktemp("apart"), 3, epochs=12, **SIMPLEX)


def test_models_trained_apart_are_compatible(tmp_path: Path, apart: Classifier) -> None:
    assert searched(tmp_path / "simplex", SIMPLEX, "d_simplex", apart) > 0.9
    # Trained classifiers agree on nothing: the same test on them is near chance.
    other = tiny.old_model(tmp_path / "old", 3, epochs=12)
    assert searched(tmp_path / "cosface", {}, "independent", other) < 0.7


def test_old_models_of_other_spaces_are_refused(
    tmp_path: Path, apart: Classifier, old: Classifier
) -> None:
    method = embedder_method("d_simplex")

    def refused(old: Classifier | None, message: str, **changes: object) -> None:
        keys = {"method": "d_simplex", **SIMPLEX, **changes}
        with pytest.raises(ConfigurationError, match=message):
            method.make_objective(tiny.inputs(tmp_path / "new", old, **keys))

    refused(None, "expected head: simplex, .*, got head: cosface", head="cosface")
    refused(old, "to have head: simplex and embedding_dim: 8")
    refused(apart, "embedding_dim: 9, got another head or 8 dimensions", embedding_dim=9)
    sorted_anew = replace(apart, class_names=("ant", "cat", "bee"))
    refused(sorted_anew, "these classes are at other places: cat, bee; list the old classes first")
    gone = replace(apart, class_names=("ant", "bee", "cow"))
    refused(gone, "these classes are at other places: cow;")
    inputs = tiny.inputs(tmp_path / "new", apart, method="d_simplex", **SIMPLEX)
    assert method.make_objective(inputs).head.classifier_weights().shape == (9, 8)
