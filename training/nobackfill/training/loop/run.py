"""A run folder: config.yaml, checkpoint.safetensors, stats.jsonl.

The checkpoint holds the trained parts (`encoder.…`, `head.…`, `upgrade.…`) and, until the training
is done, the optimiser's state, in one safetensors file whose metadata say what it is. No pickle.
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
from nobackfill.errors import ConfigurationError, VerificationError, few
from nobackfill.training.config import HOW_IMAGES_ARE_READ, Config, parse_config

CHECKPOINT, CONFIG, STATS = "checkpoint.safetensors", "config.yaml", "stats.jsonl"
_FORMAT = "nobackfill-checkpoint-1"

Facts = Mapping[str, str | int | float | bool]


@dataclass(frozen=True)
class Checkpoint:
    """What a run folder holds: trained tensors, and how far the training got."""

    config: Config
    # By part and parameter name, e.g. "encoder.backbone.0.0.weight".
    tensors: dict[str, Tensor]
    # Epochs done; the training is finished when it equals config.epochs.
    epoch: int
    step: int
    class_names: tuple[str, ...]
    # What its reader must know beside the configuration: dimensions, digests of the models it met.
    facts: dict[str, str | int | float | bool]

    @property
    def finished(self) -> bool:
        return self.epoch >= self.config.epochs

    def part(self, name: str) -> dict[str, Tensor]:
        """The state dict of one part."""
        prefix = name + "."
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def write_config(run_dir: Path, config: Config) -> None:
    """Write config.yaml: every key, defaults included."""
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_file(run_dir / CONFIG, text.encode(), 0o644)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint durably: a kill leaves the old one or the new one, whole."""
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
    """Raises ConfigurationError for a run without checkpoint, VerificationError for a damaged or
    foreign one.
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
            f"{path} is damaged ({error}); remove it and train the run again"
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
    """`read_checkpoint` of a training that ran to its end. Raises ConfigurationError otherwise."""
    checkpoint = read_checkpoint(run_dir)
    if not checkpoint.finished:
        raise ConfigurationError(
            f"{run_dir}: training stopped after epoch {checkpoint.epoch} of "
            f"{checkpoint.config.epochs}; let python training/train.py {run_dir / CONFIG} finish"
        )
    return checkpoint


def resumable(config: Config, facts: Facts | None = None) -> Checkpoint | None:
    """The checkpoint in config.run_dir, None where there is none.

    Raises ConfigurationError where it belongs to another configuration or, given the facts that a
    training would end with, has others: a model replaced at its path leaves the configuration as
    it was.
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
            f"{config.run_dir} holds a training begun with another model, or other vectors "
            f"(different: {few(sorted(others))}); remove that folder to begin anew, or put back "
            "what there was"
        )
    return done


def load_part(module: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Load one part, every tensor of it. Raises ConfigurationError naming what does not fit."""
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
    """The optimiser's state as tensors `optimizer.INDEX.NAME`."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Inverse of `optimizer_tensors`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in checkpoint.part("optimizer").items():
        index, _, name = key.partition(".")
        like = parameters[int(index)]
        # A fused step takes a parameter's memory and its momenta's to be laid out alike.
        if value.shape == like.shape:
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
