"""The training loop. It resumes after a kill and writes one JSON object per logged step.

Randomness is a function of (seed, epoch): torch's generator is seeded at the start of each epoch,
the learning rate depends only on the step, and checkpoints are written between epochs. A run that
was killed and resumed therefore computes the same as an unbroken one, bit for bit on one machine.
"""

import ctypes
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch import Tensor, nn

from nobackfill.durable import append_bytes, make_dir, write_file
from nobackfill.errors import ConfigurationError, NobackfillError, join_few
from nobackfill.training.config import Config
from nobackfill.training.data.pictures import Images, in_batches
from nobackfill.training.loop.objective import Batch, Objective
from nobackfill.training.loop.run import (
    STATS,
    Checkpoint,
    Facts,
    optimizer_tensors,
    restore_optimizer,
    resumable,
    write_checkpoint,
    write_config,
)

if TYPE_CHECKING:
    import lightning_fabric


class ProgressBars:
    """Progress bars on stderr; `visible` None: only if stderr is a terminal."""

    def __init__(self, visible: bool | None = None) -> None:
        self.visible = sys.stderr.isatty() if visible is None else visible

    @contextmanager
    def bar(self, title: str, total: int, done: int = 0) -> Iterator[Callable[[float], None]]:
        """Show a bar over `total` epochs; the yielded function advances it and shows a loss."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with RichProgress(*columns, console=console, disable=not self.visible) as bars:
            task = bars.add_task(title, total=total, completed=done, loss="")

            def advance(loss: float) -> None:
                bars.update(task, advance=1, loss=f"loss {loss:.3f}")

            yield advance


# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 1 << 30


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, for the whole process.

    By default glibc returns blocks of some megabytes to the system, which then clears every page
    again: a seventh of a small network's time. Other C libraries are left as they are.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


def precision_of(config: Config) -> Precision:
    """Return lightning-fabric's value for `config.precision`; `auto` is bf16 if the device has it.

    An explicit bf16-mixed is used even on a processor without bf16. stderr then warns that every
    product is emulated.
    """
    if config.precision == "auto":
        return "bf16-mixed" if _multiplies_bf16(config) else "32-true"
    if config.precision == "bf16-mixed" and not _multiplies_bf16(config):
        print(
            f"{config.run_dir}: this processor has no bf16 instructions, so precision: bf16-mixed "
            "is many times slower than 32-true; use precision: auto",
            file=sys.stderr,
        )
    return config.precision


def reads_in_bf16(config: Config) -> bool:
    """Return whether a model trained with this configuration computes features in bf16.

    It does if it was trained so and this device multiplies in bf16, which halves the time."""
    return config.precision in ("auto", "bf16-mixed") and _multiplies_bf16(config)


def _multiplies_bf16(config: Config) -> bool:
    if config.accelerator != "cpu" and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if config.accelerator != "cpu" and torch.backends.mps.is_available():
        return False
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class DivergedError(NobackfillError):
    """The loss became NaN or infinite; the last good checkpoint stays."""


def fit(
    objective: Objective,
    rows: Mapping[str, Images],
    config: Config,
    class_names: tuple[str, ...],
    *,
    progress: ProgressBars,
    facts: Facts | None = None,
    fabric: "lightning_fabric.Fabric | None" = None,
) -> Checkpoint:
    """Train an objective, and write checkpoints to config.run_dir.

    A finished run is returned unchanged. An unfinished run with the same configuration and facts
    resumes from its last checkpoint.

    Args:
        objective: what to minimise.
        rows: tensors or images of equal length, indexed by the rows of a batch.
        config: the training's configuration.
        class_names: names of the labels.
        progress: where to show progress.
        facts: written to the checkpoint and compared when resuming; None: no facts.
        fabric: from `launched`, if the objective was built with it; None: launch one.

    Returns:
        The checkpoint after the last epoch.

    Raises:
        ConfigurationError: the run folder belongs to a training of another configuration, other
            facts or other classes; or the machine lacks the configured devices.
        VerificationError: the checkpoint in the run folder is damaged.
        InvalidInputError: a file among the images is no image.
        DivergedError: a loss is not finite; the last checkpoint stays.
        CannotWriteError: the run folder cannot be written.
    """
    n = len(next(iter(rows.values())))
    steps = n // config.batch_size or 1
    done = resumable(config, facts or {})
    if done is not None and done.finished:
        return done
    fabric = fabric or launched(config)
    _seed(config.seed, -1 if done is None else done.epoch)
    optimizer = _optimizer(objective, config)
    first, step = _begin(fabric, objective.trained(), optimizer, config, class_names, done)
    model, optimizer = fabric.setup(objective, optimizer)
    checkpoint = done
    with progress.bar(str(config.run_dir), config.epochs, first) as advance:
        for epoch in range(first, config.epochs):
            _seed(config.seed, epoch)
            model.train()
            objective.begin_epoch(epoch, config.epochs)
            for batch in _batches(rows, n, config, fabric):
                _set_lr(optimizer, learning_rate(config, step / steps))
                terms = model(batch)
                loss = torch.stack([term.float() for term in terms.values()]).sum()
                figures = _over_devices(fabric, terms)
                _check_finite(figures, step, config)
                fabric.backward(loss)
                if config.gradient_clip is not None:
                    fabric.clip_gradients(model, optimizer, max_norm=config.gradient_clip)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if step % config.log_every == 0 and fabric.is_global_zero:
                    lr = learning_rate(config, step / steps)
                    _log(config, epoch, step, lr, figures | objective.statistics)
                step += 1
            last = epoch + 1 == config.epochs
            if last:
                objective.finish()
            if last or (epoch + 1) % config.checkpoint_every == 0:
                tensors = _tensors(objective.trained(), None if last else optimizer, step)
                checkpoint = Checkpoint(
                    config, tensors, epoch + 1, step, class_names, dict(facts or {})
                )
                if fabric.is_global_zero:
                    write_checkpoint(config.run_dir, checkpoint)
            advance(figures["loss"])
    assert checkpoint is not None
    return checkpoint


def finish(
    parts: Mapping[str, nn.Module],
    config: Config,
    class_names: tuple[str, ...],
    facts: Facts,
) -> Checkpoint:
    """Write the run of an upgrade that was solved in closed form, as a finished one.

    Raises:
        CannotWriteError: the run folder cannot be written.
    """
    tensors = _tensors(nn.ModuleDict(parts), None, 0)
    checkpoint = Checkpoint(config, tensors, config.epochs, 0, class_names, dict(facts))
    make_dir(config.run_dir)
    write_config(config.run_dir, config)
    write_checkpoint(config.run_dir, checkpoint)
    return checkpoint


def learning_rate(config: Config, epoch: float) -> float:
    """Return the rate: linear warm-up over config.warmup_epochs, then a cosine to 0 (FCT D.5).

    With config.lr_steps the rate stays config.lr after the warm-up, and each step divides it by 10.

    Args:
        config: the training's configuration.
        epoch: 0 to config.epochs, with fractions.
    """
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1e-3) / config.warmup_epochs
    if config.lr_steps:
        return config.lr * 0.1 ** sum(epoch >= step for step in config.lr_steps)
    share = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def launched(config: Config) -> "lightning_fabric.Fabric":
    """Start the processes of a training; `device` of the result is this process's.

    Raises:
        ConfigurationError: the machine does not have the configured devices.
    """
    # Imported here: it imports torch's compiler, which takes seconds. Closed-form maps and --help
    # do not need it.
    import lightning_fabric

    try:
        fabric = lightning_fabric.Fabric(
            accelerator=config.accelerator, devices=config.devices, precision=precision_of(config)
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"accelerator {config.accelerator}, devices {config.devices}: {error}"
        ) from error
    fabric.launch()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    return fabric


def _optimizer(objective: nn.Module, config: Config) -> torch.optim.Optimizer:
    parameters = [p for p in objective.parameters() if p.requires_grad]
    # A fused optimiser scales float16 gradients itself, so fabric could not clip them.
    fused = config.precision != "16-mixed"
    if config.optimizer == "adam":
        return torch.optim.Adam(
            parameters, lr=config.lr, weight_decay=config.weight_decay, fused=fused
        )
    return torch.optim.SGD(
        parameters,
        lr=config.lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=config.momentum > 0,
        fused=fused,
    )


def _seed(seed: int, epoch: int) -> None:
    digest = hashlib.sha256(f"{seed}/{epoch}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


def _batches(
    rows: Mapping[str, Images], n: int, config: Config, fabric: "lightning_fabric.Fabric"
) -> Iterator[Batch]:
    """Yield every row once, shuffled, without a last short batch (BatchNorm cannot use one row).

    With several devices each gets its share of every batch.
    """
    order = torch.randperm(n)
    size = min(config.batch_size, n)
    picked = [
        order[start : start + size][fabric.global_rank :: fabric.world_size]
        for start in range(0, n - size + 1, size)
    ]
    columns = {"rows": iter(picked)} | {k: in_batches(v, picked) for k, v in rows.items()}
    for values in zip(*columns.values(), strict=True):
        batch = zip(columns, values, strict=True)
        yield {name: value.to(fabric.device) for name, value in batch}


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _over_devices(
    fabric: "lightning_fabric.Fabric", terms: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return `loss` and the terms, averaged over devices, so that all stop at the same step."""
    mine = torch.stack([term.detach().float() for term in terms.values()])
    whole = fabric.all_reduce(mine, reduce_op="mean")
    assert isinstance(whole, Tensor)
    return {"loss": float(whole.sum()), **dict(zip(terms, whole.tolist(), strict=True))}


def _check_finite(figures: Mapping[str, float], step: int, config: Config) -> None:
    if math.isfinite(figures["loss"]):
        return
    bad = [name for name, value in figures.items() if name != "loss" and not math.isfinite(value)]
    raise DivergedError(
        f"{config.run_dir}: the loss was {figures['loss']} at step {step} "
        f"(term: {', '.join(bad)}); the last checkpoint stays. Try a lower lr, a longer warm-up "
        "or gradient_clip"
    )


def _log(config: Config, epoch: int, step: int, lr: float, figures: Mapping[str, float]) -> None:
    line = {"epoch": epoch, "step": step, "lr": lr, **figures}
    append_bytes(config.run_dir / STATS, (json.dumps(line) + "\n").encode())


def _trim_stats(path: Path, step: int) -> None:
    """Drop the lines after the last checkpoint of a killed run; resuming writes them again."""
    if not path.is_file():
        return
    whole = [line for line in path.read_text("utf-8").splitlines(keepends=True) if line[-1] == "\n"]
    write_file(path, "".join(x for x in whole if json.loads(x)["step"] < step).encode())


def _tensors(
    trained: nn.ModuleDict, optimizer: torch.optim.Optimizer | None, step: int
) -> dict[str, Tensor]:
    tensors = {k: v.detach().cpu().clone() for k, v in trained.state_dict().items()}
    for name, tensor in tensors.items():
        # The last step of an epoch can spoil weights before any loss is computed from them.
        if not torch.isfinite(tensor).all():
            raise DivergedError(
                f"{name} is NaN or infinite after step {step}; the last checkpoint stays. "
                "Try a lower lr, a longer warm-up or gradient_clip"
            )
    if optimizer is not None:
        tensors |= optimizer_tensors(optimizer)
    return tensors


def _begin(
    fabric: "lightning_fabric.Fabric",
    trained: nn.ModuleDict,
    optimizer: torch.optim.Optimizer,
    config: Config,
    class_names: tuple[str, ...],
    done: Checkpoint | None,
) -> tuple[int, int]:
    """Create the run folder, or restore from it; return the epoch and step to continue with."""
    epoch, step = (0, 0) if done is None else (done.epoch, done.step)
    if done is not None:
        if done.class_names != class_names:
            raise ConfigurationError(
                f"{config.run_dir} was begun on other classes ({join_few(done.class_names)}); "
                "restore the images, or remove that folder"
            )
        weights = {k: v for k, v in done.tensors.items() if not k.startswith("optimizer.")}
        trained.load_state_dict(weights)
        restore_optimizer(optimizer, done)
    if fabric.is_global_zero:
        if done is None:
            make_dir(config.run_dir)
            write_config(config.run_dir, config)
        _trim_stats(config.run_dir / STATS, step)
    fabric.barrier()
    return epoch, step
