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
    """The content of a run folder: trained tensors, and the progress of the training.

    Attributes:
        config: the configuration.
        tensors: on the CPU, by part and parameter, e.g. "encoder.backbone.0.0.weight".
        epoch: finished epochs; equal to config.epochs once the training is finished.
        step: finished steps; 0 for a run that was solved.
        class_names: names of the labels.
        facts: values that readers need in addition to the configuration, such as dimensions and
            digests of other models.
    """

    config: Config
    tensors: dict[str, Tensor]
    epoch: int
    step: int
    class_names: tuple[str, ...]
    facts: dict[str, str | int | float | bool]

    @property
    def is_finished(self) -> bool:
        """Whether the training has completed its last epoch; a solved run always has."""
        return self.epoch >= self.config.epochs

    def part_tensors(self, name: str) -> dict[str, Tensor]:
        """Return the state dict of one part, such as encoder or head; empty without this part.

        The tensors are those of the checkpoint, not copies.
        """
        prefix = name + "."
        return {k.removeprefix(prefix): v for k, v in self.tensors.items() if k.startswith(prefix)}


def write_config(run_dir: Path, config: Config) -> None:
    """Write config.yaml with every key, including defaults, to an existing run folder.

    An existing file is replaced atomically.

    Raises:
        CannotWriteError: the file cannot be written.
    """
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    write_file(run_dir / CONFIG, text.encode(), 0o644)


def write_checkpoint(run_dir: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint of an existing run folder durably.

    A kill leaves the old checkpoint or the new one, never a part. Tensors are copied to the CPU, so
    that a second copy of all of them is in memory.

    Raises:
        CannotWriteError: the file cannot be written; the old checkpoint stays, or the new one is
            there if only the folder could not be synced.
        RuntimeError: two tensors share CPU memory.
    """
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
    """Read the checkpoint of a run folder, finished or not.

    All tensors are read into memory, the optimiser's too.

    Raises:
        ConfigurationError: there is no checkpoint, or its configuration has keys or values that
            this version does not know.
        VerificationError: the file is damaged or no checkpoint of this program.
        OSError: the file exists, but cannot be opened.
    """
    path = run_dir / CHECKPOINT
    if not path.is_file():
        raise ConfigurationError(
            f"the run folder {run_dir} has no {CHECKPOINT}; train it first: "
            "python training/train.py CONFIG.yaml"
        )
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise VerificationError(
            f"the checkpoint {path} is damaged ({error}); delete it, and train the run again: "
            f"python training/train.py {run_dir / CONFIG}"
        ) from error
    if metadata.get("format") != _FORMAT:
        raise VerificationError(
            f"{path}: expected a checkpoint of format {_FORMAT} that train.py wrote, got format "
            f"{metadata.get('format', 'none')}; name another run folder, or train the run again"
        )
    return Checkpoint(
        parse_config(json.loads(metadata["config"]), str(path)),
        tensors,
        int(metadata["epoch"]),
        int(metadata["step"]),
        tuple(json.loads(metadata["class_names"])),
        json.loads(metadata["facts"]),
    )


def read_finished(run_dir: Path) -> Checkpoint:
    """Read the checkpoint of a finished training.

    Raises:
        ConfigurationError: there is no checkpoint, the training is not finished, or its
            configuration has keys or values that this version does not know.
        VerificationError: the file is damaged or no checkpoint of this program.
        OSError: the checkpoint exists, but cannot be opened.
    """
    checkpoint = read_checkpoint(run_dir)
    if not checkpoint.is_finished:
        raise ConfigurationError(
            f"{run_dir}: the training is not finished, it stopped after epoch {checkpoint.epoch} "
            f"of {checkpoint.config.epochs}; resume it: python training/train.py {run_dir / CONFIG}"
        )
    return checkpoint


def resumable_checkpoint(config: Config, facts: Facts | None = None) -> Checkpoint | None:
    """Return the checkpoint in config.run_dir to resume from; None without one.

    Nothing is locked or written.

    Args:
        config: the configuration of the training.
        facts: the facts that the training will record, for example digests of its models; None: do
            not compare them. A model that was replaced at its path changes only these.

    Returns:
        The checkpoint, which may be finished. Keys of how images are read may differ. Its
        configuration is the stored one.

    Raises:
        ConfigurationError: the checkpoint has another configuration or other facts, or keys that
            this version does not know.
        VerificationError: the checkpoint is damaged or was not written by train.py.
        OSError: the checkpoint exists, but cannot be opened.
    """
    if not (config.run_dir / CHECKPOINT).is_file():
        return None
    checkpoint = read_checkpoint(config.run_dir)
    stored, requested = (
        c.model_dump(exclude=HOW_IMAGES_ARE_READ) for c in (checkpoint.config, config)
    )
    if stored != requested:
        keys = [k for k in requested if stored.get(k, requested[k]) != requested[k]] or ["kind"]
        raise ConfigurationError(
            f"{config.run_dir} holds a training of another configuration (different: "
            f"{', '.join(keys)}); choose another run_dir, or remove that folder"
        )
    if facts is not None and checkpoint.facts != facts:
        names = {*checkpoint.facts, *facts}
        others = [name for name in names if checkpoint.facts.get(name) != facts.get(name)]
        raise ConfigurationError(
            f"{config.run_dir} holds a training begun with another model or other vectors "
            f"(different: {join_few(sorted(others))}); remove that folder to start again, or "
            "restore the files"
        )
    return checkpoint


def load_part(module: nn.Module, checkpoint: Checkpoint, part: str) -> None:
    """Load all tensors of one part of a checkpoint into a module, in place.

    A tensor of another dtype is converted.

    Args:
        module: the module; its parameters keep their device.
        checkpoint: the checkpoint.
        part: the name of the part, such as encoder, head or upgrade; without this part all tensors
            are missing.

    Raises:
        ConfigurationError: a tensor is missing, superfluous or of another shape; the module is
            unchanged. The message lists up to five.
    """
    stored, expected = checkpoint.part_tensors(part), module.state_dict()
    problems = [f"{key} is missing" for key in expected if key not in stored]
    problems += [f"{key} is not expected" for key in stored if key not in expected]
    problems += [
        f"{key}: expected shape {list(expected[key].shape)}, got {list(stored[key].shape)}"
        for key in expected
        if key in stored and expected[key].shape != stored[key].shape
    ]
    if problems:
        raise ConfigurationError(
            f"the {part} in the checkpoint of {checkpoint.config.run_dir} does not fit the "
            f"network of the configuration: {'; '.join(problems[:5])}. Train again in another "
            "run_dir"
        )
    module.load_state_dict(stored)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimizer's state, such as momenta, as tensors named `optimizer.INDEX.NAME`.

    INDEX is the place of a parameter in the optimizer. Before the first step the result is empty.
    Tensors of the state are not copied.
    """
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{index}.{name}": torch.as_tensor(value)
        for index, values in state.items()
        for name, value in values.items()
        if value is not None
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Load the momenta that `optimizer_tensors` put into a checkpoint.

    Without momenta in the checkpoint, the optimizer's own are dropped. Its rate and other settings
    stay.

    Args:
        optimizer: an optimizer of the same parameters in the same order; it is changed.
        checkpoint: the checkpoint; one of a finished run has no momenta.

    Raises:
        IndexError: the checkpoint has momenta of more parameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in checkpoint.part_tensors("optimizer").items():
        index, _, name = key.partition(".")
        like = parameters[int(index)]
        # A fused step needs a parameter and its momenta to have the same memory layout.
        if value.shape == like.shape:
            value = torch.empty_like(like, dtype=value.dtype).copy_(value)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
