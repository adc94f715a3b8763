"""A run folder: config.yaml, checkpoint.safetensors and stats.jsonl.

The checkpoint is one safetensors file with the trained parts (`encoder.…`, `head.…`, `upgrade.…`),
the optimiser's state until the training is finished, and metadata. It contains no pickle.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from nobackfill.durable import write_file
from nobackfill.errors import ConfigurationError, VerificationError, join_few
from nobackfill.training.config import HOW_IMAGES_ARE_READ, Config, parse_config

CHECKPOINT, CONFIG, STATS = "checkpoint.safetensors", "config.yaml", "stats.jsonl"
_FORMAT = "nobackfill-checkpoint-1"

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Checkpoint:
    """The content of a run folder: trained tensors, and the progress of the training."""

    config: Config
    # By part and parameter, e.g. "encoder.backbone.0.0.weight".
    tensors: dict[str, Tensor]
    # Finished epochs; equal to config.epochs once the training is finished.
    epoch: int
    step: int
    class_names: tuple[str, ...]
    # What readers need besides the configuration, such as dimensions and digests of other models.
    facts: dict[str, str | int | float | bool]

    @property
    def finished(self) -> bool:
        return self.epoch >= self.config.epochs

    def part(self, name: str) -> dict[str, Tensor]:
        """Return the state dict of one part."""
        prefix = name + "."
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def write_config(run_dir: Path, config: Config) -> None:
    """Write config.yaml with every key, including defaults."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_file(run_dir / CONFIG, text.encode(), 0o644)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint durably: a kill leaves the old or the new one, never a part."""
    metadata = {
        "format": _FORMAT,
        "kind": checkpoint.config.kind,
        "config": checkpoint.config.model_dump_json(),
        "epoch": str(checkpoint.epoch),
        "step": str(checkpoint.step),
        "class_names": json.dumps(checkpoint.class_names),
        "facts": json.dumps(checkpoint.facts),
    }
    tensors = {k: v.detach().cpu().contiguous() for k, v in checkpoint.tensors.items()}
    write_file(run_dir / CHECKPOINT, save(tensors, metadata), 0o644)


def read_checkpoint(run_dir: Path) -> Checkpoint:
    """Read the checkpoint of a run folder.

    Raises:
        ConfigurationError: there is no checkpoint.
        VerificationError: the file is damaged or no checkpoint of this program.
    """
    path = run_dir / CHECKPOINT
    if not path.is_file():
        raise ConfigurationError(
            f"no checkpoint {path}; train it first: python training/train.py CONFIG"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise VerificationError(
            f"{path} is damaged ({error}); delete it and train the run again"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise VerificationError(f"{path}: expected format {_FORMAT}, got {metadata.get('format')}")
    return Checkpoint(
        parse_config(json.loads(metadata["config"]), str(path)),
        tensors,
        int(metadata["epoch"]),
        int(metadata["step"]),
        tuple(json.loads(metadata["class_names"])),
        json.loads(metadata["facts"]),
    )


def read_finished(run_dir: Path) -> Checkpoint:
    """Read the checkpoint of a finished training. Raises as `read_checkpoint`, and
    ConfigurationError for an unfinished one."""
    checkpoint = read_checkpoint(run_dir)
    if not checkpoint.finished:
        raise ConfigurationError(
            f"{run_dir}: training stopped after epoch {checkpoint.epoch} of "
            f"{checkpoint.config.epochs}; run python training/train.py {run_dir / CONFIG}"
        )
    return checkpoint


def resumable(config: Config, facts: Facts | None = None) -> Checkpoint | None:
    """Return the checkpoint in config.run_dir to resume from; None without one.

    Args:
        config: the configuration of the training.
        facts: the facts that the training will record, for example digests of its models; None: do
            not compare them. A model that was replaced at its path changes only these.

    Raises:
        ConfigurationError: the checkpoint has another configuration or other facts.
        VerificationError: the checkpoint is damaged.
    """
    if not (config.run_dir / CHECKPOINT).is_file():
        return None
    done = read_checkpoint(config.run_dir)
    before, now = (c.model_dump(exclude=HOW_IMAGES_ARE_READ) for c in (done.config, config))
    if before != now:
        keys = [key for key in now if before.get(key, now[key]) != now[key]] or ["kind"]
        raise ConfigurationError(
            f"{config.run_dir} holds a training of another configuration (different: "
            f"{', '.join(keys)}); choose another run_dir, or remove that folder"
        )
    if facts is not None and done.facts != facts:
        names = {*done.facts, *facts}
        others = [name for name in names if done.facts.get(name) != facts.get(name)]
        raise ConfigurationError(
            f"{config.run_dir} holds a training begun with another model or other vectors "
            f"(different: {join_few(sorted(others))}); remove that folder to start again, or "
            "restore the files"
        )
    return done


def load_part(module: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Load all tensors of one part. Raises ConfigurationError, listing those that do not fit."""
    stored, wanted = checkpoint.part(part), module.state_dict()
    problems = [f"{key} is missing" for key in wanted if key not in stored]
    problems += [f"{key} is not expected" for key in stored if key not in wanted]
    problems += [
        f"{key}: expected shape {list(wanted[key].shape)}, got {list(stored[key].shape)}"
        for key in wanted
        if key in stored and wanted[key].shape != stored[key].shape
    ]
    if problems:
        raise ConfigurationError(
            f"checkpoint of {checkpoint.config.run_dir} does not fit its {part}: "
            + "; ".join(problems[:5])
        )
    module.load_state_dict(stored)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as tensors with names `optimizer.INDEX.NAME`."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load the momenta that `optimizer_tensors` put into a checkpoint.

    Args:
        optimizer: an optimizer of the same parameters in the same order; it is changed.
        checkpoint: the checkpoint.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in checkpoint.part("optimizer").items():
        index, _, name = key.partition(".")
        like = parameters[int(index)]
        # A fused step needs a parameter and its momenta to have the same memory layout.
        if value.shape == like.shape:
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
