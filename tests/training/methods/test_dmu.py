"""DMU on a tiny data set: what its weights are made of, what each term reaches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from nobackfill.training.losses.margins import cosface_loss, cosines
from nobackfill.training.method import Classifier
from nobackfill.training.methods.bct import BctSynthesizedObjective
from nobackfill.training.methods.dmu import DmuObjective
from nobackfill.training.networks.embedder import to_pixels
from tests.training.methods import tiny


def test_dmu_logs_how_uniform_its_weights_are(tmp_path: Path, old: Classifier) -> None:
    made = tiny.objective("dmu", tmp_path, old)
    made(tiny.batch())
    assert 1 <= made.statistics["weight_spread"] < 1.05
    sharp = tiny.objective("dmu", tmp_path, old, entropy_scale=30.0, weight_temperature=0.05)
    sharp(tiny.batch())
    assert sharp.statistics["weight_spread"] > made.statistics["weight_spread"]
    uniform = tiny.objective("dmu", tmp_path, old, measure="uniform")
    uniform(tiny.batch())
    assert uniform.statistics["weight_spread"] == 1


def test_dmus_forward_loss_reaches_psi_and_the_new_classifier_alone(
    tmp_path: Path, old: Classifier
) -> None:
    made = tiny.objective("dmu", tmp_path, old)
    assert isinstance(made, DmuObjective) and made.upgrade is not None
    made(tiny.batch())["forward"].backward()
    assert all(p.grad is not None for p in made.upgrade.parameters())
    assert all(p.grad is not None for p in made.head.parameters())
    assert all(p.grad is None for p in made.embedder.parameters())


def test_dmus_selective_loss_is_the_old_classifiers_as_equation_10_has_it(
    tmp_path: Path, old: Classifier
) -> None:
    """The pseudocode's new logits would leave a gradient in the new head."""
    made = tiny.objective("dmu", tmp_path, old, forward=False)
    made(tiny.batch())["selective"].backward()
    assert all(p.grad is None for p in made.head.parameters())
    assert any(p.grad is not None for p in made.embedder.parameters())


def test_uniform_dmu_without_psi_is_bct_sys(tmp_path: Path, old: Classifier) -> None:
    dmu = tiny.objective("dmu", tmp_path, old, measure="uniform", forward=False)
    sys = tiny.objective("bct_sys", tmp_path, old)
    assert isinstance(dmu, DmuObjective) and isinstance(sys, BctSynthesizedObjective)
    embedding, labels = torch.randn(16, 8), torch.arange(16) % 4
    expected = sys.compatibility_terms(embedding, torch.zeros(16, 3, 8, 8), labels)["influence"]
    losses = dmu.old_space_losses(embedding, torch.zeros(16, 8), labels)
    torch.testing.assert_close(losses.mean(), expected)


@pytest.mark.parametrize("measure", ["entropy", "confidence"])
def test_dmus_weights_are_the_old_classifiers_answers_to_old_embeddings(
    measure: str, tmp_path: Path, old: Classifier
) -> None:
    """Eq. 9, 10 and 13 from the old model's own vectors, where they weigh images differently."""
    made = tiny.objective(
        "dmu", tmp_path, old, measure=measure, weight=0.5, entropy_scale=8, weight_temperature=0.1
    )
    rows, batch = tiny.rows(), tiny.batch()
    stored = old.encoder.encode(to_pixels(rows["images"]))
    added = [stored[rows["labels"] == label].mean(0) for label in (2, 3)]
    classifier = torch.cat((old.head.classifier_weights(), torch.stack(added)))
    labels, pixels = batch["labels"], to_pixels(batch["images"])
    answers = softmax(8 * cosines(old.encoder.encode(pixels), classifier).double().numpy(), axis=1)
    if measure == "entropy":
        weights = (1 - softmax(entropy(answers, axis=1) / 0.1)) / 15
    else:
        weights = softmax(answers[np.arange(16), labels.numpy()] / 0.1)
    assert weights.sum() == pytest.approx(1) and weights.max() > 1.1 * weights.min()
    terms = made(batch)
    # The temperature of 0.1 makes ten of each float32 rounding of 8 times a cosine.
    spread = weights.max() / weights.min()
    assert made.statistics["weight_spread"] == pytest.approx(spread, rel=1e-4)
    embedding = made.embedder.encode(pixels).detach()
    losses = cosface_loss(cosines(embedding, classifier), labels, 0.2, 16.0).double().numpy()
    assert float(terms["selective"].detach()) == pytest.approx(0.5 * weights @ losses, rel=1e-4)


@pytest.mark.parametrize("measure", ["entropy", "confidence", "uniform"])
@pytest.mark.parametrize("regularizer", ["classification", "regression"])
def test_dmus_variants_run(measure: str, regularizer: str, tmp_path: Path, old: Classifier) -> None:
    made = tiny.objective("dmu", tmp_path, old, measure=measure, regularizer=regularizer)
    terms = made(tiny.batch())
    assert set(terms) == {"classification", "selective", "forward"}
    assert torch.isfinite(torch.stack(list(terms.values()))).all()
