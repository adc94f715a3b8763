"""Backward-compatible methods on a tiny data set: what each term sees, and that it trains."""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.losses.margins import cosface_loss, cosines
from nobackfill.training.method import CPU, Classifier, EmbedderInputs
from nobackfill.training.methods import EMBEDDER_METHODS, embedder_method
from nobackfill.training.methods.bct import BctObjective, BctSynthesizedObjective
from nobackfill.training.methods.compatible import CompatibleObjective, encode_images
from nobackfill.training.methods.mixbct import MixBctObjective
from nobackfill.training.methods.unibct import UniBctObjective, UniBctOptions, refresh_epochs
from nobackfill.training.networks.embedder import to_pixels
from nobackfill.training.networks.heads import FixedClassifier
from tests.training.methods import tiny

# Methods that encode images before their first step, or between epochs.
ENCODING = ("bct_sys", "dmu", "focal", "unibct", "mixbct", *tiny.ADAPTED)
COMPATIBLE = [n for n in EMBEDDER_METHODS if n not in ("independent", "d_simplex", *tiny.ADAPTED)]


@pytest.mark.parametrize("name", COMPATIBLE)
def test_every_method_trains_resumes_and_leaves_the_old_model_alone(
    name: str, tmp_path: Path, old: Classifier
) -> None:
    before = {k: v.clone() for k, v in old.encoder.state_dict().items()}
    inputs = tiny.inputs(tmp_path / "run", old, method=name, checkpoint_every=1)
    torch.manual_seed(1)
    made = embedder_method(name).make_objective(inputs)
    checkpoint = train_objective(
        made, tiny.rows(), inputs.config, tiny.NAMES, progress=ProgressBars(visible=False)
    )
    assert checkpoint.is_finished
    for key, value in old.encoder.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert not old.encoder.training
    assert not any("old" in key for key in checkpoint.tensors)
    text = (tmp_path / "run" / "stats.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    first, last = (sum(line["classification"] for line in part) for part in (lines[:6], lines[-6:]))
    assert last < first
    vectors = encode_images(made.embedder, inputs.images, CPU)
    assert torch.isfinite(vectors).all()


@pytest.mark.parametrize("name", [n for n in COMPATIBLE if n not in ("lwf", "focal", "mixbct")])
def test_the_terms_pull_the_new_space_towards_the_old_one(
    name: str, tmp_path: Path, old: Classifier
) -> None:
    """Without classification, the old centres of the classes must come to tell new ones apart."""
    torch.manual_seed(2)
    made = tiny.objective(name, tmp_path, old)
    for epoch in range(4):
        made.begin_epoch(epoch, 4)
    images, labels = tiny.rows()["images"], tiny.rows()["labels"]
    then = encode_images(old.encoder, images, CPU)
    centres = torch.stack([then[labels == c].mean(0) for c in (0, 1)])

    def accuracy() -> float:
        # With the batch's own statistics, which 60 steps do not settle.
        new = made.embedder(images)[labels < 2]
        return float((cosines(new, centres).argmax(1) == labels[labels < 2]).float().mean())

    start = accuracy()
    optimizer = torch.optim.Adam(made.embedder.parameters(), lr=0.01)
    for _ in range(60):
        terms = made(tiny.rows())
        loss = torch.stack([v for k, v in terms.items() if k not in ("classification", "forward")])
        optimizer.zero_grad()
        loss.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert start < 0.8 and accuracy() > 0.9


@pytest.mark.parametrize("name", ["lwf", "focal"])
def test_soft_labels_are_the_old_models_answers(name: str, tmp_path: Path, old: Classifier) -> None:
    """These two tie answers, not embeddings: what Table 8 of DMU shows to be incompatible."""
    torch.manual_seed(2)
    made = tiny.objective(name, tmp_path, old)
    images, labels = tiny.rows()["images"], tiny.rows()["labels"]
    wanted = made.old_classifier.logits(made.old_embedding(to_pixels(images))).softmax(1)
    optimizer = torch.optim.Adam(made.embedder.parameters(), lr=0.01)
    for _ in range(60):
        loss = made(tiny.rows())["soft_labels" if name == "lwf" else "focal_distillation"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    given = made.old_classifier.logits(made.embedder(images)).softmax(1)
    assert (given - wanted)[labels >= 2].abs().mean() < 0.02
    known = float((given - wanted)[labels < 2].detach().abs().mean())
    assert known > 0.1 if name == "lwf" else known < 0.02


def test_influence_is_equation_8_on_t_old_alone(tmp_path: Path, old: Classifier) -> None:
    made = tiny.objective("bct", tmp_path, old, weight=0.5)
    assert isinstance(made, BctObjective)
    embedding = torch.nn.functional.normalize(torch.randn(8, 8))
    labels = torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])
    weights = old.head.classifier_weights()
    rows = [0, 1, 4, 5]
    losses = cosface_loss(cosines(embedding[rows], weights), labels[rows], 0.2, 16.0)
    term = made.compatibility_terms(embedding, torch.zeros(8, 3, 8, 8), labels)["influence"]
    assert float(term) == pytest.approx(0.5 * float(losses.sum()) / 8, rel=1e-5)
    none_known = made.compatibility_terms(embedding[2:4], torch.zeros(2, 3, 8, 8), labels[2:4])
    assert float(none_known["influence"]) == 0


@pytest.mark.parametrize(
    ("name", "term"), [("bct_kd", "distillation"), ("lwf", "soft_labels"), ("l2", "l2")]
)
def test_terms_on_a_part_of_the_classes_leave_the_others_out(
    name: str, term: str, tmp_path: Path, old: Classifier
) -> None:
    """Soft labels for what the old model does not know, l2 for what it does; over the batch."""
    made = tiny.objective(name, tmp_path, old, weight=0.5)
    embedding = torch.nn.functional.normalize(torch.randn(16, 8))
    pixels, labels = to_pixels(tiny.batch()["images"]), tiny.batch()["labels"]
    then = old.encoder.encode(pixels)
    given, wanted = (
        softmax(old.head.logits(side).double().numpy(), axis=1) for side in (embedding, then)
    )
    losses = -(wanted * np.log(given)).sum(1)
    part = labels.numpy() >= 2
    if name == "l2":
        losses, part = 0.5 * (embedding - then).square().sum(1).numpy(), ~part
    assert 0 < part.sum() < 16
    ours = made.compatibility_terms(embedding, pixels, labels)[term]
    assert float(ours) == pytest.approx(0.5 * losses[part].sum() / 16, rel=1e-4)


@pytest.mark.parametrize(("name", "alike"), [("regress", True), ("dmu", False)])
def test_old_and_new_model_see_one_augmentation_or_two_as_the_method_says(
    name: str, alike: bool, tmp_path: Path, old: Classifier
) -> None:
    """DMU section 3.3: two augmentations of an image; the others compare one view with itself."""
    inputs = tiny.inputs(tmp_path, old, method=name, augmentation={"noise": 0.1})
    made = embedder_method(name).make_objective(inputs)
    seen: list[torch.Tensor] = []

    def see(_: torch.nn.Module, given: tuple[torch.Tensor]) -> None:
        seen.append(given[0] / 2 + 0.5)

    hooks = [
        encoder.backbone.register_forward_pre_hook(see) for encoder in (old.encoder, made.embedder)
    ]
    made(tiny.batch())
    for hook in hooks:
        hook.remove()
    first, second = seen
    assert torch.allclose(first, second, atol=1e-6) == alike
    for view in seen:
        apart = (view - to_pixels(tiny.batch()["images"])).abs().mean()
        assert 0.05 < apart < 0.1


def test_classes_meet_by_name_and_not_by_number(tmp_path: Path, old: Classifier) -> None:
    swapped = Classifier(old.encoder, old.head, ("zebra", "ant"))
    made = tiny.objective("bct", tmp_path, swapped)
    assert made.known_labels.tolist() == [1, -1, -1, -1]


def test_synthesized_rows_are_average_old_features(tmp_path: Path, old: Classifier) -> None:
    made = tiny.objective("bct_sys", tmp_path, old)
    assert isinstance(made, BctSynthesizedObjective)
    assert made.known_labels.tolist() == [0, 1, 2, 3]
    rows = tiny.rows()
    features = old.encoder.encode(to_pixels(rows["images"]))
    weights = made.old_classifier.weights
    torch.testing.assert_close(weights[:2], old.head.classifier_weights())
    for label in (2, 3):
        torch.testing.assert_close(weights[label], features[rows["labels"] == label].mean(0))


def test_a_softmax_head_gets_rows_of_its_own_length(tmp_path: Path) -> None:
    soft = tiny.old_model(tmp_path / "soft", head="softmax", margin=None, scale=None)
    inputs = tiny.inputs(tmp_path, soft, method="bct_sys", head="softmax", margin=None, scale=None)
    made = embedder_method("bct_sys").make_objective(inputs)
    assert isinstance(made, BctSynthesizedObjective)
    norms = made.old_classifier.weights.norm(dim=1)
    torch.testing.assert_close(norms[2:], norms[:2].mean().expand(2))
    torch.testing.assert_close(made.old_classifier.bias[3], made.old_classifier.bias[:2].mean())
    assert torch.isfinite(torch.stack(list(made(tiny.batch()).values()))).all()


def test_a_longer_embedding_is_compatible_in_its_first_elements(
    tmp_path: Path, old: Classifier
) -> None:
    for name in COMPATIBLE:
        if name == "mixbct":
            continue
        inputs = tiny.inputs(tmp_path, old, method=name, embedding_dim=12)
        made = embedder_method(name).make_objective(inputs)
        assert isinstance(made, CompatibleObjective)
        made.begin_epoch(3, 4)
        assert torch.isfinite(torch.stack(list(made(tiny.batch()).values()))).all()
        embedding = torch.randn(5, 12, requires_grad=True)
        first = made.cut_to_old_dim(embedding)
        torch.testing.assert_close(first.norm(dim=1), torch.ones(5))
        torch.testing.assert_close(
            first, torch.nn.functional.normalize(embedding[:, :8]), atol=1e-6, rtol=0
        )
    with pytest.raises(
        ConfigurationError, match=r"embedding_dim of at least 8, the old model's, .* got 4"
    ):
        embedder_method("bct").make_objective(
            tiny.inputs(tmp_path, old, method="bct", embedding_dim=4)
        )
    # One classifier reads its mixtures of old and new embeddings.
    with pytest.raises(ConfigurationError, match="expected embedding_dim: 8, the old model's"):
        longer = tiny.inputs(tmp_path, old, method="mixbct", embedding_dim=12)
        embedder_method("mixbct").make_objective(longer)


def test_an_old_model_of_another_input_size_sees_resized_pixels(
    tmp_path: Path, old: Classifier
) -> None:
    inputs = tiny.inputs(tmp_path, old, method="regress", image_size=16)
    made = embedder_method("regress").make_objective(inputs)
    assert isinstance(made, CompatibleObjective)
    # Of one colour each, so that a resize changes nothing but the size.
    colours = torch.rand(5, 3, 1, 1)
    large, small = colours.expand(5, 3, 16, 16), colours.expand(5, 3, 8, 8)
    torch.testing.assert_close(made.old_embedding(large), old.encoder.encode(small))


def test_unibct_waits_refreshes_and_keeps_its_prototypes(tmp_path: Path, old: Classifier) -> None:
    assert refresh_epochs(35, UniBctOptions()) == (10, {10, 20})
    assert refresh_epochs(7, UniBctOptions(warmup_share=0)) == (0, {0})
    made = tiny.objective("unibct", tmp_path, old, warmup_share=0.25)
    assert isinstance(made, UniBctObjective)
    made.begin_epoch(0, 4)
    assert set(made(tiny.batch())) == {"classification"}
    made.begin_epoch(1, 4)
    assert set(made(tiny.batch())) == {"classification", "pseudo_prototypes"}
    first = made.pseudo_classifier.weights.clone()
    with torch.no_grad():
        for parameter in made.embedder.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    made.begin_epoch(3, 4)
    assert torch.equal(made.pseudo_classifier.weights, first)
    made.begin_epoch(2, 4)
    assert not torch.equal(made.pseudo_classifier.weights, first)
    assert isinstance(made.trained_parts()["prototypes"], FixedClassifier)


def test_unibct_encodes_images_only_for_prototypes_that_are_used(
    tmp_path: Path, old: Classifier
) -> None:
    made = tiny.objective("unibct", tmp_path, old, warmup_share=0.25)
    assert isinstance(made, UniBctObjective)
    encoded = {"old": 0, "new": 0}

    def counting(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def count(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            encoded[name] += len(output)

        return count

    for name, encoder in (("old", old.encoder), ("new", made.embedder)):
        encoder.backbone.register_forward_hook(counting(name))
    images = len(tiny.rows()["images"])
    made.begin_epoch(0, 4)
    assert encoded == {"old": 0, "new": 0}
    made.begin_epoch(1, 4)
    assert encoded == {"old": images, "new": images}
    # The old ones stay what they are.
    made.begin_epoch(2, 4)
    assert encoded == {"old": images, "new": 2 * images}


def encoding_on(device: str, name: str, run_dir: Path, old: Classifier) -> EmbedderInputs:
    """Inputs of a training on a device, with an old model of its own."""
    adapted = {"embedding_dim": tiny.ADAPTED[name], "init": run_dir} if name in tiny.ADAPTED else {}
    inputs = tiny.inputs(run_dir, deepcopy(old), method=name, **adapted)
    return replace(inputs, device=torch.device(device))


@pytest.mark.parametrize("name", ENCODING)
def test_images_are_encoded_where_the_training_runs(
    name: str, tmp_path: Path, old: Classifier
) -> None:
    """On torch's device that computes nothing: what comes from there cannot be brought back."""
    inputs = encoding_on("meta", name, tmp_path, old)
    with pytest.raises(NotImplementedError, match="meta"):
        embedder_method(name).make_objective(inputs).begin_epoch(1, 4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
@pytest.mark.parametrize("name", ENCODING)
def test_what_an_accelerator_encodes_is_what_a_processor_does(
    name: str, tmp_path: Path, old: Classifier
) -> None:
    images = tiny.rows()["images"]
    there = encode_images(old.encoder, images, torch.device("cuda"))
    assert next(old.encoder.parameters()).device == there.device == CPU
    torch.testing.assert_close(there, encode_images(old.encoder, images, CPU), atol=1e-4, rtol=1e-4)
    embedder_method(name).make_objective(encoding_on("cuda", name, tmp_path, old)).begin_epoch(1, 4)


def test_vanilla_prototypes_are_class_averages(tmp_path: Path, old: Classifier) -> None:
    made = tiny.objective("unibct", tmp_path, old, prototypes="vanilla", warmup_share=0)
    assert isinstance(made, UniBctObjective)
    made.begin_epoch(0, 4)
    rows = tiny.rows()
    features = old.encoder.encode(to_pixels(rows["images"]))
    for label in range(4):
        torch.testing.assert_close(
            made.pseudo_classifier.weights[label], features[rows["labels"] == label].mean(0)
        )


def test_wrong_options_and_missing_models_are_refused(tmp_path: Path, old: Classifier) -> None:
    with pytest.raises(ConfigurationError, match=r"speed: .*has the options weight, prototypes"):
        tiny.objective("unibct", tmp_path, old, speed=3)
    with pytest.raises(ConfigurationError, match=r"method bct .* old model's run folder"):
        embedder_method("bct").make_objective(tiny.inputs(tmp_path, None, method="bct"))
    with pytest.raises(
        ConfigurationError, match="unknown embedder method 'bcd'; expected one of bct"
    ):
        embedder_method("bcd")


def test_mixbct_classifies_old_embeddings_in_the_stead_of_new_ones(
    tmp_path: Path, old: Classifier
) -> None:
    inputs = tiny.inputs(
        tmp_path, old, method="mixbct", options={"share": 0.4, "kept": 0.5}, augmentation={}
    )
    torch.manual_seed(0)
    made = embedder_method("mixbct").make_objective(inputs)
    assert isinstance(made, MixBctObjective)
    batch = {**tiny.batch(), "rows": torch.arange(16)}
    met: list[torch.Tensor] = []

    def meet(_: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        met.append(given[0].detach())

    made.head.register_forward_pre_hook(meet)
    made.train()
    for _ in range(200):
        made(batch)
    then = old.encoder(batch["images"])
    is_old = torch.stack([(one - then).abs().amax(1) < 1e-5 for one in met])
    # Of each class the half nearest to its mean, and of these as often as asked.
    every = encode_images(old.encoder, inputs.images, CPU).numpy()
    for row in range(16):
        mates = np.flatnonzero((inputs.labels == inputs.labels[row]).numpy())
        own = every[mates]
        apart = np.linalg.norm(own - own.mean(0), axis=1)
        trusted = bool(apart[mates == row] <= np.sort(apart)[len(own) // 2 - 1])
        often = float(is_old[:, row].float().mean())
        assert often == pytest.approx(0.4, abs=0.15) if trusted else often == 0
    assert 0 < is_old.any(0).sum() < 16
    # A step moves the new model by rows that are its own.
    assert all(p.grad is None for p in old.encoder.parameters())
    longer = tiny.inputs(tmp_path, old, method="mixbct", embedding_dim=9)
    with pytest.raises(ConfigurationError, match="embedding_dim: 8, the old model's, got 9"):
        embedder_method("mixbct").make_objective(longer)
