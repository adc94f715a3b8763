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
from nobackfill.release.trust.trust import find_published_manifest, read_publication
from nobackfill.training.config import (
    Augmentation,
    EmbedderConfig,
    PublishedSource,
    UpgradeConfig,
)
from nobackfill.training.data.augment import Augment, mix_pictures
from nobackfill.training.data.pictures import (
    CHUNK,
    ImageSource,
    ListedImages,
    ReadingOptions,
    chunks,
)
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
    """A frozen encoder: images uint8 [n,size,size,3] -> vectors float32 [n,dim].

    Attributes:
        name: the run folder or the release, for messages.
        encode: computes the vectors of at least one image.
        dim: the dimension of the vectors.
        image_size: side of the images in pixels.
        unit_norm: the vectors have length 1.
        model_digest: SHA-256 of the checkpoint or of the ONNX file, in hex.
        encode_in_bf16: the same as `encode` in bf16, for features to train on; None: not available.
    """

    name: str
    encode: Callable[[NDArray[np.uint8]], Floats]
    dim: int
    image_size: int
    unit_norm: bool
    model_digest: str
    encode_in_bf16: Callable[[NDArray[np.uint8]], Floats] | None = None


def load_encoder(
    run_dir: Path, kinds: tuple[str, ...] = ("embedder", "side_encoder")
) -> tuple[ImageEncoder, Checkpoint]:
    """Load the finished embedder or side encoder of a run folder, in eval mode, without gradients.

    The encoder is on the CPU. Building it draws from torch's default generator.

    Args:
        run_dir: the folder of a finished run.
        kinds: the kinds of run that are accepted.

    Raises:
        ConfigurationError: the run is missing, unfinished or of another kind; its configuration has
            unknown keys; its tensors do not fit the network; or the package of its backbone is not
            installed.
        VerificationError: the checkpoint is damaged or was not written by train.py.
        OSError: the checkpoint exists, but cannot be opened.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
    """
    checkpoint = read_finished(run_dir)
    config = checkpoint.config
    if isinstance(config, UpgradeConfig) or config.kind not in kinds:
        raise ConfigurationError(
            f"{run_dir}: expected the run folder of a training of kind {' or '.join(kinds)}, got "
            f"one of kind {config.kind}; name another run folder"
        )
    encoder = build_encoder(config)
    load_part(encoder, checkpoint, "encoder")
    return encoder.eval().requires_grad_(False), checkpoint


def load_classifier(run_dir: Path) -> Classifier:
    """Load the finished embedder of a run folder with its head, in eval mode, without gradients.

    Encoder and head are on the CPU. Building them draws from torch's default generator.

    Raises:
        ConfigurationError: the run is missing, unfinished, or of a kind other than embedder; its
            configuration has unknown keys; its tensors do not fit the network; or the package of
            its backbone is not installed.
        VerificationError: the checkpoint is damaged or was not written by train.py.
        OSError: the checkpoint exists, but cannot be opened.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
    """
    encoder, checkpoint = load_encoder(run_dir, ("embedder",))
    config = checkpoint.config
    assert isinstance(config, EmbedderConfig), "its kind says so"
    head: Head = build_head(
        config.head,
        len(checkpoint.class_names),
        config.embedding_dim,
        margin=config.margin,
        scale=config.scale,
    )
    load_part(head, checkpoint, "head")
    return Classifier(encoder, head.eval().requires_grad_(False), checkpoint.class_names)


def encoder_of_run(run_dir: Path, kind: str) -> FrozenEncoder:
    """Open the frozen encoder of a run folder, on the GPU if there is one.

    It computes 64 images at a time on a CPU and 256 on a GPU. `encode_in_bf16` is there if the
    run's precision is auto or bf16-mixed, and its configured device multiplies in bf16. The
    checkpoint is read twice, the second time for its digest. `encode` raises ValueError without
    images. Building the encoder draws from torch's default generator.

    Args:
        run_dir: the folder of a finished run.
        kind: the expected kind of run, embedder or side_encoder.

    Raises:
        ConfigurationError: the run is missing, unfinished or of another kind than `kind`; its
            configuration has unknown keys; its tensors do not fit the network; or the package of
            its backbone is not installed.
        VerificationError: the checkpoint is damaged or was not written by train.py.
        OSError: the checkpoint exists, but cannot be opened.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
    """
    encoder, checkpoint = load_encoder(run_dir, (kind,))
    device = fastest_device()
    encoder.to(device)
    size = _AT_ONCE[device.type]

    def run(images: NDArray[np.uint8]) -> Floats:
        parts = []
        with torch.no_grad():
            for start in range(0, len(images), size):
                chunk = torch.from_numpy(images[start : start + size]).to(device)
                parts.append(encoder(chunk).float().cpu().numpy())
        return np.concatenate(parts)

    def run_in_bf16(images: NDArray[np.uint8]) -> Floats:
        with torch.autocast(device.type, torch.bfloat16):
            return run(images)

    return FrozenEncoder(
        str(run_dir),
        run,
        encoder.dim,
        encoder.image_size,
        encoder.unit_norm,
        sha256_file(run_dir / CHECKPOINT),
        run_in_bf16 if reads_in_bf16(checkpoint.config) else None,
    )


def cached_features(encoder: FrozenEncoder, images: ImageSource, cache_folder: Path) -> Floats:
    """Compute the vectors of images, or read them from a cache.

    A damaged file of the cache is computed again and replaced. No image is read if the cache has
    the features. All vectors are held in memory, and the cache is written at the end.

    Args:
        encoder: the encoder.
        images: n images of its size, at least 1.
        cache_folder: a folder, made if missing, that gets one file per encoder and images.

    Returns:
        float32 [n,dim], in the order of the images.

    Raises:
        InvalidInputError: a file among the images is missing or no image.
        CannotWriteError: the cache, or the pixel cache of the images, cannot be written.
        VerificationError: a published model cannot be run, or its output has another shape;
            UnusableOutputError if some outputs are no vectors.
        NobackfillError: a process that reads images was killed.
    """
    return _features([encoder], images, cache_folder, bf16=False)[0]


def cached_training_features(
    encoders: Sequence[FrozenEncoder], images: ImageSource, cache_folder: Path
) -> list[Floats]:
    """Compute the features that an upgrade is trained on, or read them from a cache.

    Encoders that were trained in bf16 compute in bf16, if the device can. The images are read once
    for all encoders, and not at all if all features are cached. A damaged file of the cache is
    computed again and replaced. All vectors are held in memory, and the cache is written at the
    end.

    Args:
        encoders: encoders of one image size; none give an empty list. The size is not checked.
        images: n images of this size, at least 1.
        cache_folder: a folder, made if missing.

    Returns:
        float32 [n,dim] of each encoder, in the order of the encoders and of the images.

    Raises:
        InvalidInputError: a file among the images is missing or no image.
        CannotWriteError: the cache, or the pixel cache of the images, cannot be written.
        VerificationError: a published model cannot be run, or its output has another shape;
            UnusableOutputError if some outputs are no vectors.
        NobackfillError: a process that reads images was killed.
    """
    return _features(encoders, images, cache_folder, bf16=True)


def _features(
    encoders: Sequence[FrozenEncoder], images: ImageSource, cache: Path, *, bf16: bool
) -> list[Floats]:
    paths, cached, computed = [], {}, {}
    for encoder in encoders:
        run, digits = encoder.encode, ""
        if bf16 and encoder.encode_in_bf16:
            run, digits = encoder.encode_in_bf16, " bf16"
        key = hashlib.sha256(f"{encoder.model_digest} {images.digest}{digits}".encode())
        path = cache / f"{key.hexdigest()[:32]}.npy"
        paths.append(path)
        shape = (len(images), encoder.dim)
        stored = _read_features(path, shape)
        if stored is None:
            computed[path] = (run, np.empty(shape, np.float32))
        else:
            cached[path] = stored
    if computed:
        start = 0
        for part in images.chunks():
            for run, vectors in computed.values():
                vectors[start : start + len(part)] = run(part.numpy())
            start += len(part)
        make_dir(cache)
    for path, (_, vectors) in computed.items():
        data = io.BytesIO()
        np.save(data, vectors, allow_pickle=False)
        write_file(path, data.getvalue())
    return [cached[path] if path in cached else computed[path][1] for path in paths]


def _read_features(path: Path, shape: tuple[int, int]) -> Floats | None:
    """Read a feature file; None if it is missing or damaged, for example by a full disk."""
    try:
        with path.open("rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError, OSError):
        return None
    return array if array.shape == shape and array.dtype == np.float32 else None


@dataclass(frozen=True)
class AugmentedView:
    """Images augmented at their own size and scaled to `size`: uint8 [n,size,size,3].

    A seed gives the same view at every size.

    Attributes:
        images: the images.
        size: side of the result in pixels.
        augmentation: the augmentation.
        seed: of all random numbers of the view.
        is_mixed: mix each image with another of the same listing, drawn by the seed.
    """

    images: ListedImages
    size: int
    augmentation: Augmentation
    seed: int
    is_mixed: bool = False

    def __len__(self) -> int:
        return len(self.images)

    @property
    def digest(self) -> str:
        """SHA-256 of everything that determines this view, in hex; no image is read.

        It covers torch's version, because random numbers may change with it.

        It does not follow later changes of the files, because `images` computes its digest once.

        Raises:
            InvalidInputError: a file does not exist or cannot be read.
        """
        drawn = (
            f"{self.seed} {'mixed ' if self.is_mixed else ''}{self.augmentation.model_dump_json()}"
        )
        what = f"{self.images.digest} {self.size} {drawn}"
        return hashlib.sha256(f"{what} torch-{torch.__version__}".encode()).hexdigest()

    def chunks(self) -> Iterator[Tensor]:
        """Yield all images in order, at most 256 at a time, uint8 [c,size,size,3] on the CPU.

        It seeds torch's default generator at the first chunk, so nothing else may draw from it
        between chunks. Pixels are computed on the GPU if there is one. Each call yields the same
        pixels.

        Raises:
            InvalidInputError: a file is missing or no image.
            CannotWriteError: the pixel cache cannot be created.
            NobackfillError: a process that reads images was killed.
        """
        augment, device, images = Augment(self.augmentation), fastest_device(), self.images.images
        torch.manual_seed(self.seed)
        if not self.is_mixed:
            for part in chunks(images):
                yield _to_images(augment(to_pixels(part.to(device))), self.size).cpu()
            return
        others = images[torch.randperm(len(images))]
        for part, other in zip(chunks(images), chunks(others), strict=True):
            pair = (augment(to_pixels(one.to(device))) for one in (part, other))
            yield _to_images(mix_pictures(*pair), self.size).cpu()


def augmented_views(
    listing: ImageListing,
    sizes: tuple[int, ...],
    view_count: int,
    config: Augmentation,
    seed: int,
    reading: ReadingOptions,
    mixed_view_count: int = 0,
) -> Iterator[Mapping[int, ImageSource]]:
    """Yield views of the images at each of `sizes`, by size.

    The first view is the images themselves. The others are augmented at the largest size and then
    scaled down, so that every model sees the same view. The last `mixed_view_count` mix two images.
    No image is read before the caller reads a view. All augmented views share the decoded images of
    the largest size.

    Args:
        listing: the images.
        sizes: image sides in pixels, at least one; repeated ones count once.
        view_count: the number of views, the first included; at least 1.
        config: the augmentation.
        seed: the seed of the augmentation; each view gets another one from it.
        reading: how images are read.
        mixed_view_count: the number of additional mixed views, from 0.

    Yields:
        The images of one view by size, not yet read.
    """
    plain = {size: ListedImages(listing, size, reading) for size in set(sizes)}
    yield plain
    largest = plain[max(sizes)]
    for view in range(1, view_count + mixed_view_count):
        begin = seed * 1_000_003 + view
        yield {
            size: AugmentedView(largest, size, config, begin, view >= view_count) for size in plain
        }


def fastest_device() -> torch.device:
    """Return the device that computes features: a GPU of CUDA if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _to_images(pixels: Tensor, size: int) -> Tensor:
    if pixels.shape[2] != size:
        pixels = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
    return (pixels * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()


_CHUNK = 256


def encoders_of_release(source: PublishedSource) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """Open the embedder of a published release and, if it has one, its side encoder.

    They run on all cores of the CPU. Every file of the publication is verified before.

    Raises:
        ConfigurationError: the release is not published, or the folder has no publication.
        InvalidInputError: it reads no square images, or scales them otherwise than training does.
        VerificationError: a file or signature of the publication is wrong, or a model cannot be
            loaded.
        NoEncoderError: the release embeds no images.
        UnfitError: this program cannot use a published release.
        NotFoundError: the publication is incomplete.
        UnavailableError: the folder cannot be read.
        CannotWriteError: the folder for temporary files has no room for the trusted state.
        OSError: no temporary folder can be made.
    """
    manifest = find_published_manifest(
        source.release, read_publication(source.model_repo).manifests
    )
    return encoders_of_manifest(source.model_repo, manifest)


def encoders_of_manifest(
    files: Files, manifest: Manifest
) -> tuple[FrozenEncoder, FrozenEncoder | None]:
    """Open the embedder and the side encoder of a manifest, on all cores.

    They are named after the release. They compute at most 256 images at a time, and have no bf16.

    Args:
        files: the publication folder, or local files by published path.
        manifest: the release.

    Returns:
        The embedder, and the side encoder, None without one.

    Raises:
        InvalidInputError: the release reads no square images, or scales them otherwise than
            training does.
        VerificationError: a file differs from the manifest's, or cannot be loaded.
        NoEncoderError: the release embeds no images.
    """
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
    assert file is not None, "a release that reads images has a model"
    if frame != Frame(frame.height, frame.height):
        raise InvalidInputError(
            f"release {manifest.release} cannot be used for training: it reads images of "
            f"{frame.height} x {frame.width} pixels by {frame.fit} and {frame.interpolation}, but "
            "training reads square images by stretch and bilinear. Train from the release's stored "
            "vectors: old: {vectors, paths, release}"
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
