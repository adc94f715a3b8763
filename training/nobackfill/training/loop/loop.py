"""The training loop. It resumes after a kill and writes one JSON object per logged step.

Randomness is a function of (seed, epoch): torch's generator is seeded at the start of each epoch,
the learning rate depends only on the step, and checkpoints are written between epochs. A run that
was killed and resumed therefore computes the same as an unbroken one, bit for bit on one machine's
CPU.
"""

import ctypes
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
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
    resumable_checkpoint,
    write_checkpoint,
    write_config,
)

if TYPE_CHECKING:
    import lightning_fabric


class ProgressBars:
    """Progress bars on stderr.

    Args of the constructor:
        visible: whether to show them; None: only if stderr is a terminal.
    """

    def __init__(self, visible: bool | None = None) -> None:
        self.visible = sys.stderr.isatty() if visible is None else visible

    @contextmanager
    def bar(self, title: str, total: int, start: int = 0) -> Iterator[Callable[[float], None]]:
        """Show a bar over `total` epochs during the block.

        Without a visible bar the function does nothing. The bar disappears or stops with the block,
        also at an error.

        Args:
            title: the text before the bar.
            total: the number of epochs.
            start: the number of epochs that were finished before.

        Yields:
            A function that advances the bar by one epoch and shows its argument as the loss.
        """
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        console = Console(stderr=True)
        with RichProgress(*columns, console=console, disable=not self.visible) as bars:
            task = bars.add_task(title, total=total, completed=start, loss="")

            def advance(loss: float) -> None:
                bars.update(task, advance=1, loss=f"loss {loss:.3f}")

            yield advance


# Constants of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST = 1 << 30


def keep_freed_memory() -> None:
    """Make glibc keep freed memory for the next step, for the whole process.

    By default glibc returns blocks of some megabytes to the system, which then clears every page
    again: a seventh of a small network's time. The process then needs more memory. With another C
    library this does nothing. It cannot be undone.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


Precision = Literal["32-true", "bf16-mixed", "16-mixed"]


def fabric_precision(config: Config) -> Precision:
    """Return lightning-fabric's value for `config.precision`.

    `auto` becomes bf16-mixed if the configured device multiplies in bf16, else 32-true. An explicit
    bf16-mixed is used even on a device without bf16; a line on stderr then warns that it is slow.
    With accelerator auto, a GPU of CUDA counts before one of Apple, and the CPU last.
    """
    if config.precision == "auto":
        return "bf16-mixed" if _multiplies_bf16(config) else "32-true"
    if config.precision == "bf16-mixed" and not _multiplies_bf16(config):
        print(
            f"{config.run_dir}: this processor has no bf16 instructions, so the training with "
            "precision: bf16-mixed is many times slower than with 32-true; set precision: auto",
            file=sys.stderr,
        )
    return config.precision


def reads_in_bf16(config: Config) -> bool:
    """Return whether a model trained with this configuration computes features in bf16.

    It does if its precision is `auto` or bf16-mixed and the configured device multiplies in bf16,
    which halves the time. The devices of this machine count, not of the one that trained it.
    """
    return config.precision in ("auto", "bf16-mixed") and _multiplies_bf16(config)


def _multiplies_bf16(config: Config) -> bool:
    if config.accelerator != "cpu" and torch.cuda.is_available():
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if config.accelerator != "cpu" and torch.backends.mps.is_available():
        return False
    has = torch.cpu.get_capabilities()
    return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class DivergedError(NobackfillError):
    """The loss or a weight became NaN or infinite; the last checkpoint stays. Exit code 1."""


def train_objective(
    objective: Objective,
    rows: Mapping[str, Images],
    config: Config,
    class_names: tuple[str, ...],
    *,
    progress: ProgressBars,
    facts: Facts | None = None,
    fabric: "lightning_fabric.Fabric | None" = None,
) -> Checkpoint:
    """Train an objective, and write checkpoints and stats.jsonl to config.run_dir.

    A new run also gets config.yaml; the folder is made if missing. A finished run is returned
    unchanged, without a comparison of `class_names`; the objective then keeps its own parameters.
    An unfinished run with the same configuration and facts resumes from its last checkpoint. The
    caller holds the lock of the run folder. Torch's default generator is seeded again in each
    epoch. Images that do not fill a batch at the end of an epoch are left out of it; fewer images
    than batch_size are one batch.

    A checkpoint is written every `checkpoint_every` epochs and after the last; an interrupt leaves
    the last one. A line of stats.jsonl is appended every `log_every` steps. Lines after the last
    checkpoint are dropped first. With several devices only the first process writes.

    A GPU holds the tensors of `rows` if half of its free memory is enough, multiplies float32
    matrices in TF32, and checks losses only with each logged step. There a resumed run equals an
    unbroken one only nearly.

    Args:
        objective: what to minimise; its parameters change and move to the device.
        rows: tensors or images of equal length n, at least 1, indexed by the rows of a batch. The
            first one gives n; longer ones are not noticed, shorter ones raise IndexError.
        config: the training's configuration.
        class_names: names of the labels.
        progress: where to show progress.
        facts: written to the checkpoint and compared when resuming; None: no facts.
        fabric: from `launch_fabric`, if the objective was built with it; None: launch one, which
            starts a process for each device and sets torch's threads.

    Returns:
        The checkpoint after the last epoch, with its tensors on the CPU.

    Raises:
        ConfigurationError: the run folder belongs to a training of another configuration, other
            facts or, if it is unfinished, other classes; or the machine lacks the configured
            devices.
        VerificationError: the checkpoint in the run folder is damaged.
        InvalidInputError: a file among the images is missing or no image.
        NobackfillError: a process that reads images was killed.
        DivergedError: a loss or a weight is not finite; the last checkpoint stays.
        CannotWriteError: the run folder cannot be written.
        OSError: the checkpoint or stats.jsonl in the run folder cannot be opened.
        ValueError: stats.jsonl is damaged, or the objective has no parameter to train.
        ValueError, RuntimeError: as the objective raises them; the last checkpoint stays.
    """
    n = len(next(iter(rows.values())))
    steps = n // config.batch_size or 1
    resumed = resumable_checkpoint(config, facts or {})
    if resumed is not None and resumed.is_finished:
        return resumed
    fabric = fabric or launch_fabric(config)
    _seed(config.seed, -1 if resumed is None else resumed.epoch)
    optimizer = _optimizer(objective, config)
    first, step = _begin(fabric, objective.trained_parts(), optimizer, config, class_names, resumed)
    model, optimizer = fabric.setup(objective, optimizer)
    checkpoint, held = resumed, _held_on_device(rows, fabric.device)
    losses = LossCheck(config, fabric.device)
    with (
        progress.bar(str(config.run_dir), config.epochs, first) as advance,
        _tensor_cores(fabric.device),
    ):
        for epoch in range(first, config.epochs):
            _seed(config.seed, epoch)
            model.train()
            objective.begin_epoch(epoch, config.epochs)
            for batch in _batches(held, n, config, fabric):
                _set_lr(optimizer, learning_rate(config, step / steps))
                terms = model(batch)
                loss = torch.stack([term.float() for term in terms.values()]).sum()
                logs = step % config.log_every == 0
                losses.add(step, tuple(terms), _over_devices(fabric, terms), check_now=logs)
                fabric.backward(loss)
                if config.gradient_clip is not None:
                    # `losses` raises for a loss that is not finite.
                    fabric.clip_gradients(
                        model, optimizer, max_norm=config.gradient_clip, error_if_nonfinite=False
                    )
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                if logs and fabric.is_global_zero:
                    lr = learning_rate(config, step / steps)
                    _log(config, epoch, step, lr, losses.figures | objective.statistics)
                step += 1
            losses.check()
            last = epoch + 1 == config.epochs
            if last:
                objective.finish()
            if last or (epoch + 1) % config.checkpoint_every == 0:
                parts = objective.trained_parts()
                tensors = _tensors(parts, None if last else optimizer, step, config.run_dir)
                checkpoint = Checkpoint(
                    config, tensors, epoch + 1, step, class_names, dict(facts or {})
                )
                if fabric.is_global_zero:
                    write_checkpoint(config.run_dir, checkpoint)
            advance(losses.figures["loss"])
    assert checkpoint is not None
    return checkpoint


def write_solved_run(
    parts: Mapping[str, nn.Module],
    config: Config,
    class_names: tuple[str, ...],
    facts: Facts,
) -> Checkpoint:
    """Write the run of a network that was solved in closed form, as a finished one.

    An earlier run in the folder is replaced, but its stats.jsonl stays. No lock is taken.

    Args:
        parts: the solved networks, by the name of their part in the checkpoint.
        config: the configuration; its run folder is made if missing.
        class_names: names of the labels.
        facts: written to the checkpoint.

    Returns:
        The checkpoint, with copies of the tensors on the CPU.

    Raises:
        DivergedError: a solved weight is NaN or infinite; nothing is written.
        CannotWriteError: the run folder cannot be written; config.yaml may be new then.
    """
    tensors = _tensors(nn.ModuleDict(parts), None, 0, config.run_dir)
    checkpoint = Checkpoint(config, tensors, config.epochs, 0, class_names, dict(facts))
    make_dir(config.run_dir)
    write_config(config.run_dir, config)
    write_checkpoint(config.run_dir, checkpoint)
    return checkpoint


def learning_rate(config: Config, epoch: float) -> float:
    """Return the rate: linear warm-up over config.warmup_epochs, then a cosine to 0 (FCT D.5).

    With config.lr_steps the rate stays config.lr after the warm-up, and each step divides it by 10.
    At epoch 0 of a warm-up the rate is a thousandth of an epoch's increase, not 0. A step counts
    from its own epoch on.

    Args:
        config: the training's configuration.
        epoch: 0 to config.epochs, with fractions; without steps the rate is 0 at the end.
    """
    if epoch < config.warmup_epochs:
        return config.lr * (epoch + 1e-3) / config.warmup_epochs
    if config.lr_steps:
        return config.lr * 0.1 ** sum(epoch >= step for step in config.lr_steps)
    share = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def launch_fabric(config: Config) -> "lightning_fabric.Fabric":
    """Start the processes of a training, one for each of config.devices.

    With several devices, lightning-fabric runs the same command once more in each other process. It
    also sets torch's number of threads to config.threads, if that is given. A line on stderr may
    warn of a slow bf16, as in `fabric_precision`.

    Returns:
        The fabric; its `device` is this process's.

    Raises:
        ConfigurationError: the machine does not have the configured devices.
    """
    # Imported here: it imports torch's compiler, which takes seconds. Closed-form maps and --help
    # do not need it.
    import lightning_fabric

    try:
        fabric = lightning_fabric.Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            precision=fabric_precision(config),
        )
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"{config.run_dir}: this machine cannot train with accelerator: {config.accelerator} "
            f"and devices: {config.devices} ({error}); set accelerator: auto and devices: 1"
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


@contextmanager
def _tensor_cores(device: torch.device) -> Iterator[None]:
    """Multiply float32 matrices by a GPU's tensor cores, which round factors to 10 bits (TF32)."""
    before = torch.get_float32_matmul_precision()
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _held_on_device(rows: Mapping[str, Images], device: torch.device) -> dict[str, Images]:
    """Copy the tensors to a GPU once, as far as half of its free memory holds them.

    Batches are then gathered there. Others are gathered on the CPU and copied for each batch.
    """
    held = dict(rows)
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] / 2
        for name, value in rows.items():
            if isinstance(value, Tensor) and value.nbytes <= room:
                held[name], room = value.to(device), room - value.nbytes
    return held


def _batches(
    rows: Mapping[str, Images], n: int, config: Config, fabric: "lightning_fabric.Fabric"
) -> Iterator[Batch]:
    """Yield every row once, shuffled, without a last short batch (BatchNorm cannot use one row).

    With several devices each gets its share of every batch.
    """
    order = torch.randperm(n)
    size = min(config.batch_size, n)

    def picked(order: Tensor) -> list[Tensor]:
        return [
            order[start : start + size][fabric.global_rank :: fabric.world_size]
            for start in range(0, n - size + 1, size)
        ]

    here, there = picked(order), picked(order.to(fabric.device))
    columns: dict[str, Iterator[Tensor]] = {"rows": iter(there)}
    for name, value in rows.items():
        on_device = isinstance(value, Tensor) and value.device == fabric.device
        columns[name] = in_batches(value, there if on_device else here)
    for values in zip(*columns.values(), strict=True):
        batch = zip(columns, values, strict=True)
        yield {name: _to_device(value, fabric.device) for name, value in batch}


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """Copy to the device, which computes meanwhile."""
    if device.type == "cuda" and value.device.type == "cpu":
        value = value.pin_memory()
    return value.to(device, non_blocking=True)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def _over_devices(fabric: "lightning_fabric.Fabric", terms: Mapping[str, Tensor]) -> Tensor:
    """Return the terms [m], averaged over devices, so that all stop at the same step."""
    own = torch.stack([term.detach().float() for term in terms.values()])
    means = fabric.all_reduce(own, reduce_op="mean")
    assert isinstance(means, Tensor)
    return means


class LossCheck:
    """Check that losses are finite: at once on a CPU, and with the next log on a GPU.

    Reading a figure waits for the GPU, which would then have nothing to do until the next step.

    Args of the constructor:
        config: the training's configuration, for the message.
        device: where the losses are.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self._config, self._waits = config, device.type != "cpu"
        self._steps: list[tuple[int, tuple[str, ...], Tensor]] = []
        # The loss and the terms of the last step that was checked.
        self.figures: dict[str, float] = {}

    def add(self, step: int, names: tuple[str, ...], terms: Tensor, *, check_now: bool) -> None:
        """Take the terms of a step; check them, and those before, with `check_now` or on a CPU.

        Args:
            step: the number of the step.
            names: the names of the terms.
            terms: float32 [m], their values.
            check_now: do not wait.

        Raises:
            DivergedError: a loss, the sum of a step's terms, is not finite.
        """
        self._steps.append((step, names, terms))
        if check_now or not self._waits:
            self.check()

    def check(self) -> None:
        """Check the steps that were not checked yet; without any, do nothing.

        Raises:
            DivergedError: a loss is not finite; the message names the first such step.
        """
        if not self._steps:
            return
        # One copy from the device.
        values = iter(torch.cat([terms for _, _, terms in self._steps]).tolist())
        for step, names, _ in self._steps:
            own = list(islice(values, len(names)))
            self.figures = {"loss": sum(own), **dict(zip(names, own, strict=True))}
            _check_finite(self.figures, step, self._config)
        self._steps = []


def _check_finite(figures: Mapping[str, float], step: int, config: Config) -> None:
    if math.isfinite(figures["loss"]):
        return
    bad = [name for name, value in figures.items() if name != "loss" and not math.isfinite(value)]
    raise DivergedError(
        f"{config.run_dir}: the training diverged: its loss was {figures['loss']} at step {step} "
        f"(term: {', '.join(bad)}). The last checkpoint stays. Train with a lower lr, more "
        "warmup_epochs, or gradient_clip"
    )


def _log(config: Config, epoch: int, step: int, lr: float, figures: Mapping[str, float]) -> None:
    line = {"epoch": epoch, "step": step, "lr": lr, **figures}
    append_bytes(config.run_dir / STATS, (json.dumps(line) + "\n").encode())


def _trim_stats(path: Path, step: int) -> None:
    """Drop the lines after the last checkpoint of a killed run; resuming writes them again."""
    if not path.is_file():
        return
    lines = path.read_text("utf-8").splitlines(keepends=True)
    # A kill can leave a part of the last line.
    complete = [line for line in lines if line[-1] == "\n"]
    write_file(path, "".join(x for x in complete if json.loads(x)["step"] < step).encode())


def _tensors(
    trained: nn.ModuleDict, optimizer: torch.optim.Optimizer | None, step: int, run_dir: Path
) -> dict[str, Tensor]:
    tensors = {k: v.detach().cpu().clone() for k, v in trained.state_dict().items()}
    for name, tensor in tensors.items():
        # The last step of an epoch can spoil weights before any loss is computed from them.
        if not torch.isfinite(tensor).all():
            raise DivergedError(
                f"{run_dir}: the training diverged: {name} is NaN or infinite after step {step}. "
                "The last checkpoint stays. Train with a lower lr, more warmup_epochs, or "
                "gradient_clip"
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
    resumed: Checkpoint | None,
) -> tuple[int, int]:
    """Create the run folder, or restore from it; return the epoch and step to continue with."""
    epoch, step = (0, 0) if resumed is None else (resumed.epoch, resumed.step)
    if resumed is not None:
        if resumed.class_names != class_names:
            raise ConfigurationError(
                f"{config.run_dir} holds a training on other classes "
                f"({join_few(resumed.class_names)}) than the images have now "
                f"({join_few(class_names)}); restore the images, or remove that folder to start "
                "again"
            )
        weights = {k: v for k, v in resumed.tensors.items() if not k.startswith("optimizer.")}
        trained.load_state_dict(weights)
        restore_optimizer(optimizer, resumed)
    if fabric.is_global_zero:
        if resumed is None:
            make_dir(config.run_dir)
            write_config(config.run_dir, config)
        _trim_stats(config.run_dir / STATS, step)
    fabric.barrier()
    return epoch, step
