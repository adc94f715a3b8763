"""The terms of upgrade methods on imagined features: what each compares with what."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax
from scipy.stats import entropy

from nobackfill.errors import ConfigurationError
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.upgrade import fit_upgrade, load_upgrade
from nobackfill.training.losses.lce import boundary_loss, centre_alignment_loss
from nobackfill.training.methods.fastfill import FastFillObjective
from nobackfill.training.methods.fct import FctObjective
from nobackfill.training.methods.forward import ForwardObjective
from nobackfill.training.methods.residual import ResidualMap, ResidualObjective, shrunk_copy
from nobackfill.training.networks.transform import UpgradeOutput
from tests.training.methods import features


def view(n: int) -> dict[str, torch.Tensor]:
    """One view of n images."""
    return {k: v[:, 0] if v.ndim == 3 else v for k, v in features.rows(n, 4, 1).items()}


def upgraded(embedding: torch.Tensor) -> UpgradeOutput:
    """An upgrade's output, of variance 1."""
    return UpgradeOutput(embedding, None, torch.zeros(len(embedding)))


@pytest.mark.parametrize(("freeze_at", "steps"), [(0.25, 6), (0.75, 18), (1.0, 24)])
def test_batchnorm_learns_no_statistics_from_the_set_share_of_the_epochs_on(
    freeze_at: float, steps: int, tmp_path: Path
) -> None:
    """FCT D.5; 400 images are 6 batches of 64 an epoch."""
    inputs = features.inputs(tmp_path / "run", epochs=4, freeze_batchnorm_at=freeze_at)
    checkpoint = fit_upgrade(inputs, ProgressBars(visible=False), {})
    counted = [int(v) for k, v in checkpoint.tensors.items() if k.endswith("batches_tracked")]
    assert counted == [steps] * 6


def test_the_likelihood_does_not_move_h(tmp_path: Path) -> None:
    made = features.objective(features.inputs(tmp_path, method="fastfill"))
    assert isinstance(made, FastFillObjective)
    made({k: v[:32] for k, v in features.rows(32, 1).items()})["likelihood"].backward()
    assert all(p.grad is None for p in made.upgrade.h.parameters())
    assert made.upgrade.log_variance is not None
    assert any(p.grad is not None for p in made.upgrade.log_variance.parameters())


def test_joint_fastfill_weighs_distance_and_class_of_an_item_by_its_variance(
    tmp_path: Path,
) -> None:
    inputs = features.inputs(
        tmp_path, method="fastfill", options={"joint": True, "classification": 0.7}
    )
    made = features.objective(inputs)
    assert isinstance(made, FastFillObjective) and inputs.new_head is not None
    rows = view(12)
    torch.manual_seed(2)
    predicted = (rows["new"] + torch.randn(12, 7)).requires_grad_()
    log_variance = torch.randn(12, requires_grad=True)
    terms = made.distance_terms(UpgradeOutput(predicted, None, log_variance), rows)
    new = inputs.training_features["new"].flatten(0, 1)
    spread = float((new - new.mean(0)).square().sum(1).mean())
    expected = []
    for i in range(12):
        distance = float((predicted[i] - rows["new"][i]).detach().square().sum()) / spread
        label = rows["labels"][i : i + 1]
        of_class = float(inputs.new_head(predicted[i : i + 1], label).detach())
        # Of all 7 dimensions, in units of the spread.
        variance = 7 * math.exp(float(log_variance[i].detach())) / spread
        expected.append((distance + 0.7 * of_class) / variance / 2 + math.log(variance) / 2)
    assert set(terms) == {"distance"}
    assert float(terms["distance"].detach()) == pytest.approx(np.mean(expected), rel=1e-4)
    gradients = torch.autograd.grad(terms["distance"], (predicted, log_variance))
    assert all((gradient != 0).all() for gradient in gradients)


def test_classification_meets_classes_by_name_and_leaves_unknown_ones_out(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path, method="fastfill")
    made = features.objective(inputs)
    assert isinstance(made, ForwardObjective) and inputs.new_head is not None
    predicted, labels = torch.randn(10, 7), torch.arange(10) % 5
    whole = made.classification_loss(predicted, labels)
    expected = inputs.new_head(predicted, labels)
    torch.testing.assert_close(whole, expected)
    made.new_labels[:] = torch.tensor([0, 1, 2, -1, -1])
    part = made.classification_loss(predicted, labels)
    known = labels < 3
    torch.testing.assert_close(part, inputs.new_head(predicted[known], labels[known]) * 0.6)


@pytest.mark.parametrize("method", ["fastfill", "lce", "soft_prototypes"])
def test_no_term_reads_a_label_of_a_mixed_view(method: str, tmp_path: Path) -> None:
    """Mixed views that show nonsense change neither prototypes nor the terms on labels."""
    options = {"classes": 5} if method == "soft_prototypes" else {}
    keys: dict[str, Any] = {"method": method, "options": options, "mixed_views": 1}
    objectives = []
    for nonsense in (False, True):
        inputs = features.inputs(tmp_path, **keys)
        if nonsense:
            inputs.training_features["new"][:, 1] = 1e3
        # Classes then come from averages of the rows, as for a published model.
        objectives.append(features.objective(replace(inputs, new_head=None)))
    batch = {k: v[:64].clone() for k, v in features.rows(64, 3).items()}
    batch["new"][:, 1] = 1e3
    terms = []
    for objective in objectives:
        torch.manual_seed(5)
        terms.append(objective(batch))
    for name in ("classification", "alignment", "boundary"):
        if name in terms[0]:
            torch.testing.assert_close(terms[0][name], terms[1][name])
            assert float(terms[0][name].detach()) < 100
    # The labels of labelled views are read: with others the term differs.
    others = {**batch, "labels": (batch["labels"] + 1) % 5}
    torch.manual_seed(5)
    changed = objectives[0](others)["classification"]
    assert abs(float((changed - terms[0]["classification"]).detach())) > 1e-3
    # A batch may draw mixed views only.
    unlabelled = {**batch, "labels": torch.full((64,), -1)}
    assert all(torch.isfinite(term) for term in objectives[0](unlabelled).values())


def test_ours_trains_on_a_labelled_and_a_mixed_view_of_each_image(tmp_path: Path) -> None:
    options = {"both_views": True, "same_class": 0.3, "classification": 0.1}
    keys: dict[str, Any] = {"method": "residual", "options": options, "epochs": 2}
    inputs = features.inputs(tmp_path / "run", mixed_views=1, log_every=1, **keys)
    assert fit_upgrade(inputs, ProgressBars(visible=False), {}).is_finished
    lines = (tmp_path / "run" / "stats.jsonl").read_text().splitlines()
    assert len(lines) == 12 and all(json.loads(line)["same_class"] > 0 for line in lines)
    made = features.objective(inputs)
    assert isinstance(made, ResidualObjective)
    seen: list[torch.Tensor] = []
    made.upgrade.h.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    batch = {k: v[:32] for k, v in features.rows(32, 3).items()}
    made(batch)
    # The labelled views of all rows, and then the mixed ones.
    assert torch.equal(seen[0], torch.cat((batch["old"][:, 0], batch["old"][:, 1])))
    with pytest.raises(
        ConfigurationError, match=r"both_views .*needs a mixed view.*mixed_views: 1"
    ):
        features.objective(features.inputs(tmp_path / "no", **keys))


@pytest.mark.parametrize("method", ["fastfill", "residual"])
def test_the_distance_is_1_for_the_mean_of_the_new_embeddings(method: str, tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path, method=method)
    made = features.objective(inputs)
    assert isinstance(made, FastFillObjective)
    new, labels = (
        inputs.training_features["new"].flatten(0, 1),
        inputs.training_features["labels"].repeat_interleave(2),
    )
    rows = {"new": new, "labels": labels}
    for share, expected in ((1.0, 1.0), (0.5, 0.25)):
        predicted = upgraded(new + share * (new.mean(0) - new))
        distance = made.distance_terms(predicted, rows)["distance"]
        assert float(distance) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("method", ["kl", "reversed_kl"])
def test_the_divergences_are_scipys_in_the_direction_of_their_names(
    method: str, tmp_path: Path
) -> None:
    inputs = features.inputs(tmp_path, method=method)
    made = features.objective(inputs)
    assert isinstance(made, FctObjective) and inputs.new_head is not None
    rows = view(20)
    torch.manual_seed(1)
    predicted = (rows["new"] + torch.randn(20, 7)).requires_grad_()
    ours = made.distance_terms(upgraded(predicted), rows)["distance"]
    answers = [
        softmax(inputs.new_head.logits(side).detach().double().numpy(), axis=1)
        for side in (rows["new"], predicted)
    ]
    # scipy's entropy(p, q) is KL(p || q).
    expected, other = (np.mean(entropy(*pair, axis=1)) for pair in (answers, answers[::-1]))
    if method == "reversed_kl":
        expected, other = other, expected
    assert float(ours.detach()) == pytest.approx(expected, rel=1e-4)
    assert expected != pytest.approx(other, rel=0.1)
    (gradient,) = torch.autograd.grad(ours, predicted)
    assert (gradient.norm(dim=1) > 0).all()


def test_lces_boundary_is_that_of_the_new_classifiers_rows_by_class_name(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path, method="lce")
    made = features.objective(inputs)
    assert isinstance(made, ForwardObjective) and inputs.new_head is not None
    made.new_labels[:] = torch.tensor([3, 4, 0, -1, -1])
    rows = view(20)
    torch.manual_seed(1)
    predicted = rows["new"] + torch.randn(20, 7)
    terms = made.distance_terms(upgraded(predicted), rows)
    own, known = made.new_labels[rows["labels"]], rows["labels"] < 3
    weights = inputs.new_head.classifier_weights()
    outside = boundary_loss(predicted[known], rows["new"][known], weights, own[known])
    assert set(terms) == {"classification", "alignment", "boundary"}
    torch.testing.assert_close(terms["boundary"], outside.sum() / 20)
    aligned = centre_alignment_loss(predicted, rows["new"], rows["labels"])
    torch.testing.assert_close(terms["alignment"], aligned.mean())


def test_the_listwise_term_makes_neighbours_those_of_the_new_embedding(tmp_path: Path) -> None:
    """Descending it alone carries the distribution over neighbours to the true one."""
    inputs = features.inputs(tmp_path, method="residual", options={"queue": 512})
    made = features.objective(inputs)
    assert isinstance(made, ResidualObjective)
    rows = view(20)
    queue = inputs.training_features["new"].flatten(0, 1)
    spread = torch.pdist(queue).square().mean()

    def answers(embedding: torch.Tensor) -> np.ndarray:
        nearness = -torch.cdist(embedding, queue).square() / (0.1 * spread)
        shares: np.ndarray = softmax(nearness.detach().double().numpy(), axis=1)
        return shares

    torch.manual_seed(1)
    predicted = (rows["new"] + torch.randn(20, 7)).requires_grad_()
    wanted = answers(rows["new"])
    before = np.mean(entropy(wanted, answers(predicted), axis=1))
    optimizer = torch.optim.Adam([predicted], lr=0.05)
    for _ in range(150):
        loss = made.distance_terms(upgraded(predicted), rows)["listwise"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    after = np.mean(entropy(wanted, answers(predicted), axis=1))
    assert before > 0.5 and after < 0.02 * before


def test_several_networks_learn_apart_and_answer_together(tmp_path: Path) -> None:
    inputs = features.inputs(tmp_path, method="residual", options={"members": 3})
    made = features.objective(inputs)
    assert isinstance(made, ResidualObjective)
    h = made.upgrade.h
    assert isinstance(h, ResidualMap)
    asked: list[int] = []
    numbers = {network: number for number, network in enumerate(h.members)}

    def met(network: torch.nn.Module, given: object, answer: object) -> None:
        assert isinstance(network, torch.nn.Sequential)
        asked.append(numbers[network])

    hooks = []
    for network in h.members:
        last = network[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.normal_(last.weight, std=0.1)
        hooks.append(network.register_forward_hook(met))
    terms = made({k: v[:32] for k, v in features.rows(32, 1).items()})
    # One after the other, not all for each.
    assert asked == [0, 1, 2] and h.active_member is None
    terms["distance"].backward()
    assert all(p.grad is not None for network in h.members for p in network.parameters())
    for hook in hooks:
        hook.remove()
    made.upgrade.eval()
    rows = view(20)
    outputs = []
    for number in range(3):
        h.active_member = number
        outputs.append(h(rows["old"], rows["side"]))
    h.active_member = None
    together = h(rows["old"], rows["side"])
    torch.testing.assert_close(together, (outputs[0] + outputs[1] + outputs[2]) / 3)
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    halved = shrunk_copy(made.upgrade, 0.5).h(rows["old"], rows["side"])
    straight = h.straight(h.whiten_inputs(rows["old"], rows["side"]))
    torch.testing.assert_close(halved, (straight + together) / 2)


def test_several_networks_are_distilled_into_one(tmp_path: Path) -> None:
    options = {"members": 3, "distilled": True}
    keys: dict[str, Any] = {"method": "residual", "options": options, "unit": True}
    made = features.objective(features.inputs(tmp_path / "apart", epochs=40, **keys))
    assert isinstance(made, ResidualObjective)
    h = made.upgrade.h.eval()
    assert isinstance(h, ResidualMap) and len(h.members) == 3
    for network in h.members:
        last = network[-1]
        assert isinstance(last, torch.nn.Linear)
        torch.nn.init.normal_(last.weight, std=0.3)
    rows = {k: v[:, 0] for k, v in features.rows(200, 7, unit=True).items() if v.ndim == 3}
    with torch.no_grad():
        white = h.whiten_inputs(rows["old"], rows["side"])
        outputs = torch.stack([network(white) for network in h.members])
        straight = h.straight(white)
        # By hand, on rows that the distillation does not see.
        wanted = torch.nn.functional.normalize(straight + outputs.mean(0))
        first = torch.nn.functional.normalize(straight + outputs[0])
    made.finish()
    with torch.no_grad():
        distilled = h(rows["old"], rows["side"])
    assert len(h.members) == 1
    apart = float((first - wanted).square().sum(1).mean())
    assert float((distilled - wanted).square().sum(1).mean()) < 0.3 * apart
    # A run's checkpoint holds one network, too.
    inputs = features.inputs(tmp_path / "run", epochs=2, **keys)
    loaded = load_upgrade(fit_upgrade(inputs, ProgressBars(visible=False), {})).h
    assert isinstance(loaded, ResidualMap) and len(loaded.members) == 1
    with pytest.raises(ConfigurationError, match=r"distilled trains one .*; set members: 3"):
        features.objective(
            features.inputs(tmp_path, method="residual", options={"distilled": True})
        )
