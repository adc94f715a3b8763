"""Models that are used, not trained: of a run or of a release, and their features cached on disk.

A feature file is named by what it depends on: the model's digest, the pixels' digest. So two
trainings over the same images share it, and nothing stale is ever read.
"""

import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.class_folders import Images, Listing, decode
from nobackfill.digests import sha256_file
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError
from nobackfill.training.config import Augmentation, EmbedderConfig, SideEncoderConfig
from nobackfill.training.data.augment import Augment
from nobackfill.training.loop.run import CHECKPOINT, Checkpoint, load_part, read_finished
from nobackfill.training.method import Classifier
from nobackfill.training.networks.embedder import ImageEncoder, build_encoder, to_pixels
from nobackfill.training.networks.heads import Head, build_head

Floats = NDArray[np.float32]
_CHUNK = 256


@dataclass(frozen=True)
class FrozenEncoder:
    """images uint8 [n,size,size,3] -> vectors float32 [n,dim], of a run or a release."""

    name: str
    run: Callable[[NDArray[np.uint8]], Floats]
    dim: int
    image_size: int
    unit: bool
    # sha256 of the checkpoint or the ONNX file.
    digest: str


def load_encoder(run_dir: Path) -> tuple[ImageEncoder, Checkpoint]:
    """The finished embedder or side encoder of a run folder, in eval mode, frozen."""
    checkpoint = read_finished(run_dir)
    config = checkpoint.config
    if not isinstance(config, EmbedderConfig | SideEncoderConfig):
        raise ConfigurationError(
            f"{run_dir}: expected a run of kind embedder or side_encoder, got {config.kind}"
        )
    encoder = build_encoder(config)
    load_part(encoder, checkpoint, "encoder")
    return encoder.eval().requires_grad_(False), checkpoint


def load_classifier(run_dir: Path) -> Classifier:
    """The finished embedder of a run folder with its head. Raises ConfigurationError for another
    kind.
    """
    encoder, checkpoint = load_encoder(run_dir)
    config = checkpoint.config
    if not isinstance(config, EmbedderConfig):
        raise ConfigurationError(f"{run_dir}: expected a run of kind embedder, got {config.kind}")
    head: Head = build_head(
        config.head,
        len(checkpoint.class_names),
        config.embedding_dim,
        margin=config.margin,
        scale=config.scale,
    )
    load_part(head, checkpoint, "head")
    return Classifier(encoder, head.eval().requires_grad_(False), checkpoint.class_names)


def of_run(run_dir: Path, kind: str) -> FrozenEncoder:
    """The frozen encoder of a run folder. Raises ConfigurationError for a run of another kind."""
    encoder, checkpoint = load_encoder(run_dir)
    if checkpoint.config.kind != kind:
        raise ConfigurationError(
            f"{run_dir}: expected a run of kind {kind}, got {checkpoint.config.kind}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoder.to(device)

    def run(images: NDArray[np.uint8]) -> Floats:
        parts = []
        with torch.no_grad():
            for start in range(0, len(images), _CHUNK):
                chunk = torch.from_numpy(images[start : start + _CHUNK]).to(device)
                parts.append(encoder(chunk).cpu().numpy())
        return np.concatenate(parts)

    digest = sha256_file(run_dir / CHECKPOINT)
    return FrozenEncoder(str(run_dir), run, encoder.dim, encoder.image_size, encoder.unit, digest)


def features(encoder: FrozenEncoder, images: Images, cache: Path) -> Floats:
    """Vectors [n,dim] of images uint8 [n,size,size,3], computed once and kept in the folder
    `cache`.
    """
    key = hashlib.sha256(f"{encoder.digest} {images.shape}".encode())
    key.update(np.ascontiguousarray(images).data)
    path = cache / f"{key.hexdigest()[:32]}.npy"
    if path.is_file():
        stored: Floats = np.load(path, allow_pickle=False)
        return stored
    vectors = encoder.run(images)
    data = io.BytesIO()
    np.save(data, vectors, allow_pickle=False)
    make_dir(cache)
    write_file(path, data.getvalue())
    return vectors


def augmented_views(
    listing: Listing, sizes: tuple[int, ...], views: int, config: Augmentation, seed: int
) -> Iterator[dict[int, Images]]:
    """`views` times the images of `listing` at each of `sizes`: {size: uint8 [n,size,size,3]}.

    The first is the images as they are; the others are augmented once at the largest size and
    scaled down, so that every model sees the same view.
    """
    plain = {size: decode(listing, size) for size in set(sizes)}
    yield plain
    largest = max(sizes)
    augment = Augment(config)
    for view in range(1, views):
        torch.manual_seed(seed * 1_000_003 + view)
        scaled: dict[int, Images] = {size: np.empty_like(plain[size]) for size in plain}
        for start in range(0, len(listing), _CHUNK):
            rows = slice(start, start + _CHUNK)
            pixels = augment(to_pixels(torch.from_numpy(plain[largest][rows])))
            for size in plain:
                scaled[size][rows] = _to_images(pixels, size)
        yield scaled


def _to_images(pixels: Tensor, size: int) -> Images:
    if pixels.shape[2] != size:
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    images: Images = (pixels * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
    return images
