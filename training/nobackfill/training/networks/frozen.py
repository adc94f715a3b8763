"""Frozen models of a run or a release, and their features, cached on disk.

The name of a feature file is a digest of the model and of the images' file names, lengths and
modification times. Trainings over the same images share the file, and no image is read if all
features are cached. A file that was replaced by one with the same name, length and time is not
detected.
"""

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.class_folders import ImageListing
from nobackfill.digests import sha256_file
from nobackfill.durable import make_dir, write_file
from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.framing import Frame
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import Files, open_embedder, open_side_encoder
from nobackfill.release.trust.trust import read_publication, require_release
from nobackfill.training.config import (
    Augmentation,
    EmbedderConfig,
    PublishedSource,
    SideEncoderConfig,
)
from nobackfill.training.data.augment import Augment, mixed
from nobackfill.training.data.pictures import CHUNK, ImageSource, Listed, Reading, chunks
from nobackfill.training.loop.loop import reads_in_bf16
from nobackfill.training.loop.run import CHECKPOINT, Checkpoint, load_part, read_finished
from nobackfill.training.method import Classifier
from nobackfill.training.networks.embedder import (
    ImageEncoder,
    build_encoder,
    to_pixels,
)
from nobackfill.training.networks.heads import Head, build_head
from nobackfill.vectors import Vectors

Floats = NDArray[np.float32]

# Images per batch. More of them exceed a CPU's caches: 256 took 1.3 times as long.
_AT_ONCE = {"cpu": 64, "cuda": CHUNK}


@dataclass(frozen=True)
class FrozenEncoder:
    """A frozen encoder: images uint8 [n,size,size,3] -> vectors float32 [n,dim]."""

    name: str
    run: Callable[[NDArray[np.uint8]], Floats]
    dim: int
    image_size: int
    unit: bool
    # SHA-256 of the checkpoint or of the ONNX file.
    digest: str
    # The same in bf16, for features to train on; None: not available.
    quick: Callable[[NDArray[np.uint8]], Floats] | None = None


def load_encoder(run_dir: Path) -> tuple[ImageEncoder, Checkpoint]:
    """Load the finished embedder or side encoder of a run folder, in eval mode, without gradients.

    Raises:
        ConfigurationError: the run is missing, unfinished, or neither an embedder nor a side
            encoder.
        VerificationError: the checkpoint is damaged.
    """
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
    """Load the finished embedder of a run folder with its head, in eval mode, without gradients.

    Raises:
        ConfigurationError: the run is missing, unfinished, or of a kind other than embedder.
        VerificationError: the checkpoint is damaged.
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
    """Open the frozen encoder of a run folder.

    Args:
        run_dir: the folder of a finished run.
        kind: the expected kind of run, embedder or side_encoder.

    Raises:
        ConfigurationError: the run is missing, unfinished or of another kind than `kind`.
        VerificationError: the checkpoint is damaged.
    """
    encoder, checkpoint = load_encoder(run_dir)
    if checkpoint.config.kind != kind:
        raise ConfigurationError(
            f"{run_dir}: expected a run of kind {kind}, got {checkpoint.config.kind}"
        )
    device = _device()
    encoder.to(device)
    size = _AT_ONCE[device.type]

    def run(images: NDArray[np.uint8]) -> Floats:
        parts = []
        with torch.no_grad():
            for start in range(0, len(images), size):
                chunk = torch.from_numpy(images[start : start + size]).to(device)
                parts.append(encoder(chunk).float().cpu().numpy())
        return np.concatenate(parts)

    def quick(images: NDArray[np.uint8]) -> Floats:
        with torch.autocast(device.type, torch.bfloat16):
            return run(images)

    return FrozenEncoder(
        str(run_dir),
        run,
        encoder.dim,
        encoder.image_size,
        encoder.unit,
        sha256_file(run_dir / CHECKPOINT),
        quick if reads_in_bf16(checkpoint.config) else None,
    )


def features(encoder: FrozenEncoder, images: ImageSource, cache: Path) -> Floats:
    """Return float32 [n,dim] of images uint8 [n,size,size,3], cached in the folder `cache`."""
    return _features([encoder], images, cache, quick=False)[0]


def training_features(
    encoders: Sequence[FrozenEncoder], images: ImageSource, cache: Path
) -> list[Floats]:
    """Return the features that an upgrade is trained on, for each encoder.

    Encoders that were trained in bf16 compute in bf16. The images are read only once."""
    return _features(encoders, images, cache, quick=True)


def _features(
    encoders: Sequence[FrozenEncoder], images: ImageSource, cache: Path, *, quick: bool
) -> list[Floats]:
    paths, kept, computed = [], {}, {}
    for encoder in encoders:
        run, digits = (encoder.quick, " bf16") if quick and encoder.quick else (encoder.run, "")
        key = hashlib.sha256(f"{encoder.digest} {images.digest}{digits}".encode())
        path = cache / f"{key.hexdigest()[:32]}.npy"
        paths.append(path)
        shape = (len(images), encoder.dim)
        found = _read_features(path, shape)
        if found is None:
            computed[path] = (run, np.empty(shape, np.float32))
        else:
            kept[path] = found
    if computed:
        done = 0
        for part in images.chunks():
            for run, vectors in computed.values():
                vectors[done : done + len(part)] = run(part.numpy())
            done += len(part)
        make_dir(cache)
    for path, (_, vectors) in computed.items():
        data = io.BytesIO()
        np.save(data, vectors, allow_pickle=False)
        write_file(path, data.getvalue())
    return [kept[path] if path in kept else computed[path][1] for path in paths]


def _read_features(path: Path, shape: tuple[int, int]) -> Floats | None:
    """Read a feature file; None if it is missing or damaged, for example by a full disk."""
    try:
        with path.open("rb") as file:
            found = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return found if found.shape == shape and found.dtype == np.float32 else None


@dataclass(frozen=True)
class AugmentedView:
    """Images augmented at their own size and scaled to `size`: uint8 [n,size,size,3].

    A seed gives the same view at every size.
    """

    images: Listed
    size: int
    config: Augmentation
    seed: int
    # Mix each image with another image of the same listing, drawn by the seed.
    mixed: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def digest(self) -> str:
        """The digest of this view, computed without making it."""
        drawn = f"{self.seed} {'mixed ' if self.mixed else ''}{self.config.model_dump_json()}"
        what = f"{self.images.digest} {self.size} {drawn}"
        return hashlib.sha256(f"{what} torch-{torch.__version__}".encode()).hexdigest()

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, in chunks."""
        augment, device, images = Augment(self.config), _device(), self.images.opened
        torch.manual_seed(self.seed)
        if not self.mixed:
            for part in chunks(images):
                yield _to_images(augment(to_pixels(part.to(device))), self.size).cpu()
            return
        others = images[torch.randperm(len(images))]
        for part, other in zip(chunks(images), chunks(others), strict=True):
            pair = (augment(to_pixels(one.to(device))) for one in (part, other))
            yield _to_images(mixed(*pair), self.size).cpu()


def augmented_views(
    listing: ImageListing,
    sizes: tuple[int, ...],
    views: int,
    config: Augmentation,
    seed: int,
    reading: Reading,
    mixed_views: int = 0,
) -> Iterator[Mapping[int, ImageSource]]:
    """Yield views of the images at each of `sizes`, by size.

    The first view is the images themselves. The others are augmented at the largest size and then
    scaled down, so that every model sees the same view. The last `mixed_views` mix two images.

    Args:
        listing: the images.
        sizes: image sides in pixels.
        views: the number of views, the first included.
        config: the augmentation.
        seed: the seed of the augmentation.
        reading: how images are read.
        mixed_views: the number of additional mixed views.
    """
    plain = {size: Listed(listing, size, reading) for size in set(sizes)}
    yield plain
    largest = plain[max(sizes)]
    for view in range(1, views + mixed_views):
        begin = seed * 1_000_003 + view
        yield {size: AugmentedView(largest, size, config, begin, view >= views) for size in plain}


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _to_images(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[2] != size:
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return (pixels * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


_CHUNK = 256


def of_release(source: PublishedSource) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """Open the embedder of a release and, if it has one, its side encoder."""
    manifest = require_release(source.release, read_publication(source.model_repo).manifests)
    return of_manifest(source.model_repo, manifest)


def of_manifest(files: Files, manifest: Manifest) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """Open the encoders of a manifest whose files, published or drafted, are at `files`."""
    spec, side = manifest.embedder, manifest.side_encoder
    size, sha256 = _square(manifest)
    threads = os.cpu_count() or 1
    embedder = open_embedder(files, manifest, threads)
    name = f"release {manifest.release}"
    first = FrozenEncoder(name, _chunked(embedder.run), spec.dim, size, spec.unit, sha256)
    if side is None:
        return first, None
    encoder = open_side_encoder(files, manifest, threads)
    return first, FrozenEncoder(
        f"{name}, side-information",
        _chunked(encoder.run),
        side.dim,
        size,
        False,
        side.file.sha256,
    )


def _square(manifest: Manifest) -> tuple[int, str]:
    """Return the side of the images, and the digest of the image model."""
    frame, file = manifest.frame, manifest.embedder.file
    assert file is not None, "what reads images has a model"
    if frame != Frame(frame.height, frame.height):
        raise InvalidInputError(
            f"release {manifest.release} takes {frame.height} x {frame.width} images by "
            f"{frame.fit}, {frame.interpolation}; training supports only square images with "
            "stretch and bilinear. Train from the release's stored vectors"
        )
    return frame.height, file.sha256


def _chunked(
    run: Callable[[NDArray[np.uint8]], Vectors],
) -> Callable[[NDArray[np.uint8]], Vectors]:
    def run_in_chunks(images: NDArray[np.uint8]) -> Vectors:
        return np.concatenate(
            [run(images[start : start + _CHUNK]) for start in range(0, len(images), _CHUNK)]
        )

    return run_in_chunks
