import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

from nobackfill.durable import FAULT_INJECTOR
from nobackfill.errors import CannotWriteError, ConfigurationError, VerificationError
from nobackfill.training.config import Config
from nobackfill.training.loop.loop import (
    DivergedError,
    LossCheck,
    ProgressBars,
    learning_rate,
    train_objective,
)
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.loop.run import CHECKPOINT, STATS, read_checkpoint, read_finished
from nobackfill.training.loop.training import train
from tests.training.life import config_of, train_quietly, upgrade_config


class Line(Objective):
    """Fits y = a x; `poison` makes the loss NaN at that step."""

    def __init__(self, poison: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(1, 1)
        self.poison, self.step = poison, 0

    def forward(self, batch: Batch) -> Terms:
        loss = (self.line(batch["x"]) - batch["y"]).square().mean()
        # Draws belong to (seed, epoch), as dropout and augmentation do.
        noise = torch.randn(()) * 0.01 * self.line.weight.sum()
        self.step += 1
        return {"fit": loss * torch.nan if self.step - 1 == self.poison else loss, "noise": noise}

    def trained_parts(self) -> nn.ModuleDict:
        return nn.ModuleDict({"line": self.line})


def rows() -> dict[str, Tensor]:
    x = torch.linspace(-1, 1, 64)[:, None]
    return {"x": x, "y": 3 * x}


def line_config(tmp_path: Path, **keys: object) -> Config:
    return config_of("embedder", tmp_path / "run", tmp_path, log_every=1, **keys)


def run(objective: Objective, config: Config) -> None:
    train_objective(objective, rows(), config, ("a", "b"), progress=ProgressBars(visible=False))


@pytest.mark.long
def test_a_killed_training_resumes_to_the_same_result(digits: Path, tmp_path: Path) -> None:
    """Killed by SIGKILL at a durable step, in a process of its own, then run again."""
    keys: dict[str, object] = {"epochs": 6, "checkpoint_every": 2, "log_every": 1, "classes": 3}
    keys["augmentation"] = {"rotate_degrees": 10, "noise": 0.1}
    unbroken = config_of("embedder", tmp_path / "unbroken", digits / "train", **keys)
    train_quietly(unbroken)
    broken = config_of("embedder", tmp_path / "broken", digits / "train", **keys)
    file = tmp_path / "broken.yaml"
    file.write_text(yaml.safe_dump(broken.model_dump(mode="json")), encoding="utf-8")
    killed = subprocess.run(
        [sys.executable, "training/train.py", file],
        # Step 41 of the durable ones is inside the second checkpoint's write.
        env={**os.environ, "NOBACKFILL_FAULT": "kill@41"},
        capture_output=True,
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert read_checkpoint(broken.run_dir).epoch == 2
    train_quietly(broken)
    first, second = read_finished(unbroken.run_dir), read_finished(broken.run_dir)
    assert first.tensors.keys() == second.tensors.keys()
    for name, tensor in first.tensors.items():
        assert torch.equal(tensor, second.tensors[name]), name
    logs = [(c.run_dir / STATS).read_text("utf-8") for c in (unbroken, broken)]
    assert logs[0] == logs[1]


@pytest.mark.long
def test_a_write_that_fails_at_any_step_loses_nothing(tmp_path: Path) -> None:
    """Each durable step of a training in turn: an error in words, then the same result."""
    config = line_config(tmp_path, epochs=4, checkpoint_every=1)
    unbroken = config.model_copy(update={"run_dir": tmp_path / "unbroken", "log_every": 3})
    run(Line(), unbroken)
    whole, failed = read_finished(unbroken.run_dir), True
    for step in itertools.count(1):
        broken = unbroken.model_copy(update={"run_dir": tmp_path / f"broken-{step}"})
        FAULT_INJECTOR.arm(f"enospc@{step}")
        try:
            run(Line(), broken)
            failed = False
        except CannotWriteError:
            failed = True
        finally:
            FAULT_INJECTOR.arm(None)
        if failed:
            run(Line(), broken)
        done = read_finished(broken.run_dir)
        assert all(torch.equal(t, done.tensors[name]) for name, t in whole.tensors.items())
        logs = [(c.run_dir / STATS).read_text("utf-8") for c in (unbroken, broken)]
        assert logs[0] == logs[1]
        if not failed:
            break
    # Folder, configuration, log lines and four checkpoints.
    assert step > 30


class StopAfter(ProgressBars):
    """Stands for Ctrl-C right after the epoch `last` was saved."""

    def __init__(self, last: int) -> None:
        super().__init__(visible=False)
        self.last = last

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
        epochs = itertools.count(done + 1)

        def advance(loss: float) -> None:
            if next(epochs) == self.last:
                raise KeyboardInterrupt

        yield advance


def resumes_alike(whole: Config, after: int = 2) -> None:
    """A training that was stopped after an epoch ends in the same bits as the unbroken one."""
    halved = whole.model_copy(update={"run_dir": whole.run_dir.with_name("halved")})
    train_quietly(whole)
    with pytest.raises(KeyboardInterrupt):
        train(halved, StopAfter(after))
    assert read_checkpoint(halved.run_dir).epoch == after
    train_quietly(halved)
    first, second = read_finished(whole.run_dir), read_finished(halved.run_dir)
    assert first.tensors.keys() == second.tensors.keys()
    assert all(torch.equal(t, second.tensors[name]) for name, t in first.tensors.items())


@pytest.mark.parametrize("kind", ["simclr", "distilled"])
def test_a_side_encoder_resumes_to_the_same_result(kind: str, digits: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"epochs": 4, "checkpoint_every": 1, "batch_size": 8}
    keys |= {"small_crops": 1, "classes": 3, "side_info": kind}
    keys |= {"image_size": 16, "augmentation": {"erase": 0.3, "rotate_degrees": 10}}
    resumes_alike(config_of("side_encoder", tmp_path / "whole", digits / "queries", **keys), 3)


@pytest.mark.parametrize(("method", "dim"), [("bt2", 32), ("lambda_orthogonal", 16)])
def test_an_adapted_embedder_resumes_to_the_same_result(
    method: str, dim: int, runs: Path, digits: Path, tmp_path: Path
) -> None:
    keys: dict[str, object] = {"epochs": 4, "checkpoint_every": 1, "method": method}
    keys |= {"old": str(runs / "embedder-1"), "init": str(runs / "embedder-2")}
    keys |= {"embedding_dim": dim, "optimizer": "adam", "lr": 0.01}
    keys["augmentation"] = {"rotate_degrees": 10, "noise": 0.1}
    resumes_alike(config_of("embedder", tmp_path / "whole", digits / "train", **keys))


def test_an_upgrade_resumes_to_the_same_result(runs: Path, digits: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"epochs": 4, "checkpoint_every": 1}
    resumes_alike(upgrade_config(runs, digits / "train", tmp_path / "whole", **keys))


def test_the_loss_falls_and_is_logged_a_line_a_step(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=20, warmup_epochs=0)
    run(Line(), config)
    lines = [json.loads(line) for line in (config.run_dir / STATS).read_text("utf-8").splitlines()]
    assert [line["step"] for line in lines] == list(range(40))
    assert lines[-1]["fit"] < lines[0]["fit"] / 10
    for line in lines:
        assert line["loss"] == pytest.approx(line["fit"] + line["noise"])


@pytest.mark.parametrize("epochs", [4])
def test_nan_stops_with_the_step_and_keeps_the_last_good_checkpoint(
    epochs: int, tmp_path: Path
) -> None:
    config = line_config(tmp_path, epochs=epochs, checkpoint_every=1)
    with pytest.raises(DivergedError, match=r"nan at step 5 \(term: fit\)") as caught:
        run(Line(poison=5), config)
    assert caught.value.exit_code == 1
    kept = read_checkpoint(config.run_dir)
    assert kept.epoch == 2
    assert all(torch.isfinite(t).all() for t in kept.tensors.values())


def test_losses_of_a_gpu_are_checked_together_and_name_the_first_bad_step(tmp_path: Path) -> None:
    config, nan = line_config(tmp_path), torch.tensor([torch.nan])
    losses = LossCheck(config, torch.device("cuda"))
    losses.add(0, ("fit", "noise"), torch.tensor([1.0, 0.5]), check_now=False)
    assert not losses.figures
    losses.add(1, ("fit",), torch.tensor([2.0]), check_now=True)
    assert losses.figures == {"loss": 2.0, "fit": 2.0}
    for step in (2, 3):
        losses.add(step, ("fit",), nan, check_now=False)
    with pytest.raises(DivergedError, match=r"nan at step 2 \(term: fit\)"):
        losses.check()
    with pytest.raises(DivergedError, match="nan at step 0"):
        LossCheck(config, torch.device("cpu")).add(0, ("fit",), nan, check_now=False)


def test_weights_that_became_nan_are_not_saved(tmp_path: Path) -> None:
    class Spoiled(Line):
        def finish(self) -> None:
            nn.init.constant_(self.line.weight, torch.nan)

    config = line_config(tmp_path, epochs=3, checkpoint_every=1)
    with pytest.raises(DivergedError, match=r"line\.weight"):
        run(Spoiled(), config)
    assert read_checkpoint(config.run_dir).epoch == 2


def test_another_configuration_is_refused_in_the_same_folder(tmp_path: Path) -> None:
    run(Line(), line_config(tmp_path, epochs=2))
    with pytest.raises(ConfigurationError, match=r"different: epochs, lr"):
        run(Line(), line_config(tmp_path, epochs=3, lr=0.5))


def test_other_classes_are_refused_in_a_begun_run(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=4, checkpoint_every=1)
    with pytest.raises(DivergedError):
        run(Line(poison=5), config)
    with pytest.raises(ConfigurationError, match=r"training on other classes \(a, b\)"):
        train_objective(Line(), rows(), config, ("a", "c"), progress=ProgressBars(visible=False))


def test_a_finished_run_is_kept_as_it_is(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=2)
    run(Line(), config)
    before = (config.run_dir / CHECKPOINT).stat()
    run(Line(), config)
    assert (config.run_dir / CHECKPOINT).stat() == before


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=2)
    run(Line(), config)
    path = config.run_dir / CHECKPOINT
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(VerificationError, match="damaged"):
        run(Line(), config)


def test_an_unfinished_run_is_no_model(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=4, checkpoint_every=1)
    with pytest.raises(DivergedError):
        run(Line(poison=5), config)
    with pytest.raises(ConfigurationError, match="after epoch 2 of 4"):
        read_finished(config.run_dir)


def test_the_learning_rate_warms_up_and_falls_in_one_cosine(tmp_path: Path) -> None:
    config = line_config(tmp_path, epochs=10, warmup_epochs=2, lr=0.4)
    rates = [learning_rate(config, epoch / 10) for epoch in range(101)]
    assert rates[0] < 0.001
    assert rates[10] == pytest.approx(0.2, abs=0.001)
    assert rates[20] == pytest.approx(0.4)
    assert rates[60] == pytest.approx(0.2)
    assert rates[100] == pytest.approx(0, abs=1e-9)
    assert all(a < b for a, b in itertools.pairwise(rates[:21]))
    assert all(a > b for a, b in itertools.pairwise(rates[20:]))


def test_the_learning_rate_falls_in_steps(tmp_path: Path) -> None:
    """BCT's 16 epochs: .1, and a tenth of it after 8, 12 and 14, as torch's own schedule."""
    config = line_config(tmp_path, epochs=16, warmup_epochs=0, lr=0.1, lr_steps=(8, 12, 14))
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 12, 14])
    for epoch in range(16):
        (expected,) = schedule.get_last_lr()
        assert learning_rate(config, epoch) == pytest.approx(expected), epoch
        assert learning_rate(config, epoch + 0.99) == pytest.approx(expected), epoch
        optimizer.step()
        schedule.step()
    warm = line_config(tmp_path, epochs=16, warmup_epochs=2, lr=0.1, lr_steps=(8,))
    rates = [learning_rate(warm, epoch) for epoch in (0, 1, 2, 7, 8)]
    assert rates == pytest.approx([0, 0.05, 0.1, 0.1, 0.01], abs=1e-4)
    for wrong in ((12, 8), (8, 8), (8, 16)):
        with pytest.raises(ConfigurationError, match="the key lr_steps: expected ascending"):
            line_config(tmp_path, epochs=16, lr_steps=wrong)


def test_seeds_matter(digits: Path, tmp_path: Path) -> None:
    weights = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        config = config_of(
            "embedder", tmp_path / name, digits / "queries", epochs=1, warmup_epochs=0, seed=seed
        )
        weights.append(train_quietly(config).tensors["head.loss.W"])
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
