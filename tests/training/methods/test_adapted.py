"""Methods that keep an independent model: what they keep of it, and what meets the old space."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.metrics.distances import to_unit_norm
from nobackfill.training.export.onnx_export import export_onnx, run_onnx
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.loop.run import Checkpoint, read_finished
from nobackfill.training.method import Classifier
from nobackfill.training.methods import embedder_method
from nobackfill.training.networks.backbones import replace_layer
from nobackfill.training.networks.embedder import ImageEncoder, to_pixels
from nobackfill.training.networks.frozen import load_classifier, load_encoder
from tests.training.methods import tiny

OWN, OLD = 8, 8


@pytest.fixture(scope="module")
def independent(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Knows all four classes, and nothing of the old model. Read only."""
    run_dir = tmp_path_factory.mktemp("independent") / "run"
    tiny.old_model(run_dir, classes=4, seed=3, epochs=8)
    return read_finished(run_dir)


def adapt(
    name: str, folder: Path, old: Classifier, independent: Checkpoint, **options: object
) -> Path:
    """The run folder of a finished training."""
    inputs = tiny.inputs(
        folder,
        old,
        method=name,
        embedding_dim=tiny.ADAPTED[name],
        init=independent.config.run_dir,
        options=options,
        epochs=30,
        optimizer="adam",
        lr=0.02,
        log_every=1000,
    )
    torch.manual_seed(1)
    made = embedder_method(name).make_objective(inputs)
    made.start_from(independent, tiny.NAMES)
    train_objective(
        made, tiny.rows(), inputs.config, tiny.NAMES, progress=ProgressBars(visible=False)
    )
    return folder


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory, old: Classifier, independent: Checkpoint
) -> dict[str, Path]:
    """A run of each method by its own defaults. Read only."""
    folder = tmp_path_factory.mktemp("finished")
    return {name: adapt(name, folder / name, old, independent) for name in tiny.ADAPTED}


def vectors(run_dir: Path) -> NDArray[np.float64]:
    encoder, _ = load_encoder(run_dir)
    return of(encoder, tiny.rows()["images"])


def of(encoder: ImageEncoder, images: Tensor) -> NDArray[np.float64]:
    with torch.no_grad():
        given: NDArray[np.float64] = encoder(images).double().numpy()
    return given


def layer(run_dir: Path) -> NDArray[np.float64]:
    """The embedding layer's weights with their bias as a column."""
    part = read_finished(run_dir).part_tensors("encoder")
    weight, bias = (part[f"backbone.6.{name}"] for name in ("weight", "bias"))
    return torch.cat((weight, bias[:, None]), 1).double().numpy()


def features_of(run_dir: Path) -> NDArray[np.float64]:
    """What the embedding layer reads, with a column of ones for the bias."""
    encoder, _ = load_encoder(run_dir)
    replace_layer(encoder.backbone, "6", torch.nn.Identity())
    with torch.no_grad():
        read = encoder.features(to_pixels(tiny.rows()["images"])).double().numpy()
    return np.column_stack((read, np.ones(len(read))))


def meets(vectors: NDArray[np.float64], then: NDArray[np.float64]) -> float:
    """Mean cosine between the first elements and the old vectors of the same images."""
    return float((to_unit_norm(vectors[:, :OLD]) * then).sum(1).mean())


@pytest.mark.parametrize("name", tiny.ADAPTED)
def test_the_first_elements_come_to_meet_the_old_vectors(
    name: str, finished: dict[str, Path], old: Classifier, independent: Checkpoint
) -> None:
    run = finished[name]
    then = of(old.encoder, tiny.rows()["images"])
    before, after = vectors(independent.config.run_dir), vectors(run)
    assert after.shape == (len(then), tiny.ADAPTED[name])
    assert meets(before, then) < 0.5 and meets(after, then) > 0.8
    # Nothing else of the independent model has changed.
    kept, made = independent.part_tensors("encoder"), read_finished(run).part_tensors("encoder")
    assert kept.keys() == made.keys()
    for key, tensor in kept.items():
        assert torch.equal(tensor, made[key]) == (not key.startswith("backbone.6.")), key


@pytest.mark.long
@pytest.mark.parametrize("name", tiny.ADAPTED)
def test_what_is_published_is_an_ordinary_embedder(
    name: str, finished: dict[str, Path], tmp_path: Path
) -> None:
    """Loaded as any other, its graph computes the same, and its head classifies."""
    images = tiny.rows()["images"]
    classifier = load_classifier(finished[name])
    encoder = classifier.encoder
    path = tmp_path / "model.onnx"
    export_onnx(encoder, {"images": images[:4]}, ("embedding",), path)
    (embedding,) = run_onnx(path, {"images": images.numpy()}, ("embedding",))
    np.testing.assert_allclose(embedding, of(encoder, images), atol=1e-5)
    answers = classifier.head.logits(torch.from_numpy(embedding)).argmax(1)
    assert (answers == tiny.rows()["labels"]).float().mean() > 0.9


@pytest.mark.parametrize("name", tiny.ADAPTED)
def test_a_backbone_without_a_linear_layer_is_refused(
    name: str, old: Classifier, independent: Checkpoint, tmp_path: Path
) -> None:
    inputs = tiny.inputs(
        tmp_path,
        old,
        method=name,
        embedding_dim=tiny.ADAPTED[name],
        init=independent.config.run_dir,
        backbone="fct_resnet50",
    )
    with pytest.raises(ConfigurationError, match="fct_resnet50 has no linear layer"):
        embedder_method(name).make_objective(inputs)


def test_bt2_turns_what_it_keeps_and_puts_the_rest_beside_it(
    finished: dict[str, Path], independent: Checkpoint
) -> None:
    """Q [own; further] with Q'Q = 1: inner products are those of the independent layer plus those
    of no more than 8 further numbers, whatever Q is.
    """
    kept = layer(independent.config.run_dir)
    made = layer(finished["bt2"])
    further = np.linalg.eigvalsh(made.T @ made - kept.T @ kept)
    largest = np.abs(made.T @ made).max()
    assert further.min() > -1e-5 * largest
    assert (further > 1e-5 * largest).sum() == OLD


@pytest.mark.long
def test_bt2s_distances_are_the_independent_models_as_far_as_it_is_kept(
    tmp_path: Path, old: Classifier, independent: Checkpoint
) -> None:
    before = vectors(independent.config.run_dir)
    own = layer(independent.config.run_dir)
    for share in (0.6, 0.95):
        run = adapt("bt2", tmp_path / f"{share}", old, independent, share=share)
        # Inner products before normalisation are the own ones and those of the rest.
        features = features_of(run)
        lengths = np.linalg.norm(features @ own.T, axis=1) / np.linalg.norm(
            features @ layer(run).T, axis=1
        )
        assert lengths == pytest.approx(np.full(len(lengths), share), abs=0.05)
        after = vectors(run)
        apart = np.abs(after @ after.T - before @ before.T).max()
        assert apart < 2 * (1 - share**2) + 0.1


def from_orthogonal(run: Path, independent: Checkpoint) -> float:
    """|W'W - 1| of the map that was folded, found from the layers before and after."""
    kept, made = layer(independent.config.run_dir)[:, :-1], layer(run)[:, :-1]
    found = made @ np.linalg.pinv(kept)
    np.testing.assert_allclose(found @ kept, made, atol=1e-4)
    return float(np.linalg.norm(found.T @ found - np.eye(OWN)))


@pytest.mark.long
def test_lambda_is_how_far_the_map_may_be_from_orthogonal(
    tmp_path: Path, old: Classifier, independent: Checkpoint
) -> None:
    def far(name: str, **options: object) -> float:
        run = adapt("lambda_orthogonal", tmp_path / name, old, independent, **options)
        return from_orthogonal(run, independent)

    free = far("free", orthogonality=0)
    assert free > 1.5
    assert far("strict", threshold=0) < 0.1
    # Below its threshold nothing is penalised, so that it is used.
    assert 0.5 < far("half", threshold=0.75) < 0.8
    assert far("wide", threshold=2 * free) == pytest.approx(free)


def test_what_cannot_be_kept_is_refused(
    tmp_path: Path, old: Classifier, independent: Checkpoint
) -> None:
    def start(name: str, **changes: object) -> None:
        values = {"method": name, "init": independent.config.run_dir} | changes
        made = embedder_method(name).make_objective(tiny.inputs(tmp_path, old, **values))
        made.start_from(independent, tiny.NAMES)

    for name in tiny.ADAPTED:
        with pytest.raises(
            ConfigurationError, match=r"expected init: RUN, .* and last_nonlin: false"
        ):
            start(name, init=None)
        with pytest.raises(ConfigurationError, match=r"got init: .* and last_nonlin: true"):
            start(name, last_nonlin=True)
        with pytest.raises(
            ConfigurationError, match=r"the encoder in .* does not fit .*: backbone\.0\.0"
        ):
            start(name, embedding_dim=tiny.ADAPTED[name], width=8)
    with pytest.raises(ConfigurationError, match=r"embedding_dim above 8, e\.g\. 16, got 8"):
        start("bt2")
    with pytest.raises(ConfigurationError, match="expected embedding_dim: 8, got 9"):
        start("lambda_orthogonal", embedding_dim=9)
