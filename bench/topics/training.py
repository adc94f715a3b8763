"""The training loop against a bare torch loop, the feature cache, and evaluation of whole sets."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from bench import data
from bench.harness import (
    Bench,
    Contender,
    Measurement,
    Row,
    Table,
    comparison_table,
    run_interleaved,
)
from nobackfill.metrics import retrieval
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.training.config import Augmentation, EmbedderConfig
from nobackfill.training.data.pictures import chunks
from nobackfill.training.loop.loop import ProgressBars, train_objective
from nobackfill.training.networks.embedder import EmbedderObjective
from nobackfill.training.networks.frozen import FrozenEncoder, cached_features

PIXELS = 32
CLASSES = 10
LOOP = (
    "Images a second of one epoch on one thread: 32 x 32 pixels, a small ResNet, CosFace, batches "
    "of 128. `bare` is the same network, head, optimiser and batches in ten lines of torch, "
    "without schedule, log, checkpoint or checks; the warm-up epoch is not counted."
)
CARD = (
    "Images a second of one epoch on one GPU: 32 x 32 pixels, CosFace, bf16, batches of 256 (small "
    "ResNet) and 512 (ResNet50). `bare` is the same network, head, optimiser and batches in ten "
    "lines of torch, with the pixels on the GPU, and no schedule, log, checkpoint or checks; one "
    "epoch before is not counted."
)
EVALUATED = (
    "mAP@1.0, CMC-1 and CMC-5 over the whole ranking of 128 dims, one BLAS thread, random labels."
)


def run(bench: Bench) -> list[Table]:
    """Loop, cache, evaluation; the loop on a GPU too, if there is one."""
    torch.set_num_threads(1)
    card = [_on_card(bench, *each) for each in NETWORKS if torch.cuda.is_available()]
    return [_loop(bench), *card, _cache(bench), _evaluation(bench)]


def _config(bench: Bench, round_: int, augmentation: Augmentation) -> EmbedderConfig:
    return EmbedderConfig(
        kind="embedder",
        run_dir=bench.folder / f"run-{round_}",
        images=bench.folder,
        epochs=1,
        lr=0.05,
        image_size=PIXELS,
        backbone="small_resnet",
        width=16,
        embedding_dim=64,
        batch_size=128,
        threads=1,
        augmentation=augmentation,
        accelerator="cpu",
    )


# Networks that a GPU trains: backbone, width, images of a batch, batches of an epoch.
NETWORKS = (("small_resnet", 64, 256, 195), ("resnet50", 32, 512, 40))


def _on_card(bench: Bench, backbone: str, width: int, batch: int, batches: int) -> Table:
    """Compare the loop with a bare one on a GPU, without and with augmentation."""

    def config(number: int, augmentation: Augmentation) -> EmbedderConfig:
        return _config(bench, number, augmentation).model_copy(
            update={
                "run_dir": bench.folder / f"{backbone}-{number}",
                "backbone": backbone,
                "width": width,
                "embedding_dim": 128,
                "batch_size": batch,
                "threads": None,
                "accelerator": "cuda",
                "precision": "bf16-mixed",
            }
        )

    changed = Augmentation(horizontal_flip=True, translate=0.125)
    count = bench.size(4, batches, batches) * batch
    measured = _beside_bare(bench, config, changed, count, 100)
    card = torch.cuda.get_device_name()
    return comparison_table(f"{backbone} on {card}", "images/s", measured, "bare torch", CARD)


def _loop(bench: Bench) -> Table:
    changed = Augmentation(translate=0.1, rotate_degrees=10, scale=0.1)
    count = bench.size(256, 2048, 8192)
    measured = _beside_bare(bench, partial(_config, bench), changed, count, CLASSES)
    return comparison_table("Training loop", "images/s", measured, "bare torch", LOOP)


def _beside_bare(
    bench: Bench,
    config: Callable[[int, Augmentation], EmbedderConfig],
    changed: Augmentation,
    count: int,
    classes: int,
) -> dict[str, Measurement]:
    """Train an epoch of `count` images by the loop and by a bare one, on the configured device."""
    images = torch.from_numpy(data.draw_images(count, PIXELS))
    labels = torch.from_numpy(np.random.default_rng(0).integers(0, classes, count))
    names = tuple(str(n) for n in range(classes))
    plain = Augmentation()
    runs = iter(range(10_000))

    def ours(augmentation: Augmentation) -> float:
        own = config(next(runs), augmentation)
        torch.manual_seed(0)
        objective = EmbedderObjective(own, classes)
        rows = {"images": images, "labels": labels}
        started = time.perf_counter()
        train_objective(objective, rows, own, names, progress=ProgressBars(visible=False))
        return count / (time.perf_counter() - started)

    def bare() -> float:
        own = config(0, plain)
        device, batch = own.accelerator, own.batch_size
        on_gpu = device == "cuda"
        torch.manual_seed(0)
        objective = EmbedderObjective(own, classes).to(device)
        network, head = objective.embedder.backbone, objective.head
        optimiser = torch.optim.SGD(
            objective.parameters(), lr=0.05, momentum=0.9, nesterov=True, fused=on_gpu
        )
        wait: Callable[[], None] = torch.cuda.synchronize if on_gpu else lambda: None
        wait()
        started = time.perf_counter()
        held, held_labels = images.to(device), labels.to(device)
        order = torch.randperm(count, device=device)
        for start in range(0, count - batch + 1, batch):
            picked = order[start : start + batch]
            pixels = held[picked].permute(0, 3, 1, 2).float() / 255
            with torch.autocast(device, torch.bfloat16, enabled=on_gpu):
                vectors = network((pixels - 0.5) / 0.5)
            loss = head(F.normalize(vectors.float()), held_labels[picked])
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        wait()
        return count / (time.perf_counter() - started)

    contenders = [
        Contender("bare torch", bare),
        Contender("ours", lambda: ours(plain)),
        Contender("ours, augmented", lambda: ours(changed)),
    ]
    return run_interleaved(contenders, bench.size(1, 3, 7))


@dataclass(frozen=True)
class _Held:
    """Images of no files."""

    images: torch.Tensor
    digest: str = "held"

    def __len__(self) -> int:
        return len(self.images)

    def chunks(self) -> Iterator[torch.Tensor]:
        return chunks(self.images)


def _cache(bench: Bench) -> Table:
    """Features of a frozen model: computed, and found again."""
    count = bench.size(256, 4096, 16384)
    images = _Held(torch.from_numpy(data.draw_images(count, PIXELS)))
    objective = EmbedderObjective(_config(bench, 0, Augmentation()), CLASSES)
    network = objective.embedder.eval()

    def embed(some: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            pixels = torch.from_numpy(some)
            return np.concatenate(
                [network(pixels[i : i + 256]).numpy() for i in range(0, len(pixels), 256)]
            )

    encoder = FrozenEncoder("bench", embed, 64, PIXELS, True, "0" * 64)
    rows: list[Row] = []
    for name in ("computed", "from the cache"):
        started = time.perf_counter()
        cached_features(encoder, images, bench.folder / "features")
        rows.append({"features": name, "images/s": count / (time.perf_counter() - started)})
    return Table("Feature cache", rows, f"{count:,} images of a frozen model, one thread.")


def _evaluation(bench: Bench) -> Table:
    sizes = [bench.size(300, 10_000, 10_000)] + [50_000] * bench.full
    rows: list[Row] = []
    for size in sizes:
        vectors = data.draw_items(size).new
        # Another seed than that of the vectors: their clusters must not be the labels.
        labels = np.random.default_rng(11).integers(0, 100, size)
        relevance = relevance_by_label(labels, labels, np.arange(size), np.arange(size))
        started = time.perf_counter()
        retrieval.search_and_score(vectors, vectors, relevance)
        took = time.perf_counter() - started
        rows.append(
            {
                "queries x items": f"{size:,} x {size:,}",
                "seconds": took,
                "million pairs/s": size * size / took / 1e6,
            }
        )
    return Table("Evaluation", rows, EVALUATED)
