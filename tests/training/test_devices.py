"""Two devices on this machine, both the CPU: what one computes, and one writer of files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from nobackfill.training.loop.run import STATS, read_finished
from tests.training.life import config_of
from tests.training.two_devices import fit_line

# Rendezvous and traffic stay on this machine.
ENV = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def fitted(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.training.two_devices", *map(str, arguments)]
    return subprocess.run(
        command, env=ENV, capture_output=True, text=True, check=False, timeout=120
    )


def stats(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / STATS).read_text("utf-8").splitlines()]


@pytest.mark.long
def test_two_devices_compute_what_one_computes(tmp_path: Path) -> None:
    fit_line(tmp_path / "1", 1)
    done = fitted(tmp_path / "2", 2)
    assert done.returncode == 0, done.stderr
    one, two = (stats(tmp_path / name) for name in ("1", "2"))
    # One writer: each step once, and every figure that of the whole batch.
    assert [line["step"] for line in two] == list(range(len(one))) and len(one) == 8
    for mine, theirs in zip(one, two, strict=True):
        for name in ("loss", "fit", "weight"):
            np.testing.assert_allclose(theirs[name], mine[name], rtol=1e-4)
    first, second = (read_finished(tmp_path / name).tensors for name in ("1", "2"))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.faults
def test_a_loss_that_one_device_finds_not_finite_stops_both(tmp_path: Path) -> None:
    """Else the other one waits for it for ever."""
    done = fitted(tmp_path / "run", 2, 5)
    assert done.returncode != 0
    assert "its loss was nan at step" in done.stderr and "term: fit" in done.stderr


@pytest.mark.faults
def test_train_py_on_two_devices(digits: Path, tmp_path: Path) -> None:
    config = config_of(
        "embedder", tmp_path / "run", digits / "train", classes=2, epochs=2, devices=2, log_every=1
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "training/train.py", file],
        env=ENV,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    checkpoint = read_finished(tmp_path / "run")
    steps = [line["step"] for line in stats(tmp_path / "run")]
    assert steps == list(range(checkpoint.step))
    assert done.stdout.count("checkpoint.safetensors") == 1


def test_a_command_says_which_extra_it_needs(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    ended = subprocess.run(
        [sys.executable, "training/train.py", "configs/digits/embedder-1.yaml"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=False, timeout=120,
    )  # fmt: skip
    assert ended.returncode == 78, ended.stderr
    assert "torch is needed here" in ended.stderr
    assert "pip install '.[training]'" in ended.stderr
