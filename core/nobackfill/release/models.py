"""Running a release's ONNX files: digest first, then a session, then every output checked."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.digests import sha256_bytes
from nobackfill.errors import (
    InvalidInputError,
    UnusableOutputError,
    UnusableRowsError,
    VerificationError,
)
from nobackfill.framing import Frame
from nobackfill.release.image_model import File, ImageModel
from nobackfill.vectors import Vectors, check_vectors

if TYPE_CHECKING:
    # A device's search has no time to load pydantic: see image_model.py.
    from nobackfill.release.manifest import Manifest, Upgrade

# A publication folder, or published paths with the local files that stand for them (a draft).
Files = Path | Mapping[str, Path]

Images = NDArray[np.uint8]

# Rows that an upgrade is given at once, by a device, by a gateway and by a trial.
CHUNK = 1024


@dataclass(frozen=True)
class Upgraded:
    """What an upgrade gives: `embedding` [n,dim], `side` [n,side_dim] or None, `uncertainty` [n] or
    None (larger is less certain)."""

    embedding: Vectors
    side: Vectors | None
    uncertainty: Vectors | None


class ImageEmbedder:
    """phi_N: images to embeddings. Made by `open_embedder`."""

    def __init__(self, session: "Session", model: ImageModel) -> None:
        self._session = session
        self._model = model
        self.dim = model.dim

    def run(self, images: Images) -> Vectors:
        """uint8 [n,H,W,3] of the release's size to float32 [n,dim].

        Raises InvalidInputError for other images, VerificationError for outputs that are no vectors
        of the release's space, UnusableOutputError where only some are none.
        """
        checked = _check_images(images, self._model.frame)
        (embedding,) = self._session.run({"image": checked}, ["embedding"])
        return checked_output(embedding, len(checked), self.dim, "embedding", unit=self._model.unit)


class SideEncoder:
    """psi_N: images to side-information. Made by `open_side_encoder`."""

    def __init__(self, session: "Session", manifest: "Manifest", dim: int) -> None:
        self._session = session
        self._frame = manifest.frame
        self.dim = dim

    def run(self, images: Images) -> Vectors:
        """uint8 [n,H,W,3] of the release's size to float32 [n,side_dim]. Raises as Embedder.run."""
        checked = _check_images(images, self._frame)
        (side,) = self._session.run({"image": checked}, ["side"])
        return checked_output(side, len(checked), self.dim, "side")


class UpgradeModel:
    """The upgrade M->N. Made by `open_upgrade`."""

    def __init__(self, session: "Session", manifest: "Manifest", upgrade: "Upgrade") -> None:
        self._session = session
        self._manifest = manifest
        self.upgrade = upgrade
        self._outputs = [name for name, _, _ in manifest.upgrade_ends(upgrade)[1]]

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """Embeddings [n,from_dim] and, where the upgrade reads it, `side` [n,from_side_dim].

        Where `side` is carried, the given one comes back unchanged. Raises InvalidInputError for
        inputs of another shape or a missing `side`, VerificationError for outputs that are no
        vectors of the target's space.
        """
        upgrade = self.upgrade
        inputs = {
            "embedding": check_vectors(embedding, upgrade.from_dim, what="embedding to upgrade")
        }
        count = len(inputs["embedding"])
        if upgrade.reads_side:
            if side is None or len(side) != count:
                raise InvalidInputError(
                    f"upgrade from release {upgrade.from_release}: expected {count} rows of "
                    f"side-information, got {'none' if side is None else len(side)}"
                )
            inputs["side"] = check_vectors(
                side, upgrade.from_side_dim, what="side-information to upgrade"
            )
        values = dict(zip(self._outputs, self._session.run(inputs, self._outputs), strict=True))
        spec = self._manifest.embedder
        return Upgraded(
            checked_output(values["upgraded"], count, spec.dim, "upgraded", unit=spec.unit),
            self._side(values, count, side),
            _check_uncertainty(values["uncertainty"], count) if "uncertainty" in values else None,
        )

    def _side(
        self, values: dict[str, NDArray[Any]], count: int, side: Vectors | None
    ) -> Vectors | None:
        encoder = self._manifest.side_encoder
        if self.upgrade.side == "maps" and encoder is not None:
            return checked_output(values["upgraded_side"], count, encoder.dim, "upgraded_side")
        return side if self.upgrade.side == "carries" else None


def open_embedder(files: Files, manifest: "Manifest", threads: int = 1) -> ImageEmbedder:
    """Load phi_N on the CPU. Raises VerificationError for a file other than the manifest's,
    NoEncoderError where the release embeds no images."""
    return open_image_model(files, ImageModel.of(manifest), threads)


def open_image_model(files: Files, model: ImageModel, threads: int = 1) -> ImageEmbedder:
    """The same of what was read of a manifest. Raises VerificationError."""
    return ImageEmbedder(open_session(files, model.file, threads), model)


def open_side_encoder(files: Files, manifest: "Manifest", threads: int = 1) -> SideEncoder:
    """Load psi_N on the CPU. Raises VerificationError; InvalidInputError if there is none."""
    encoder = manifest.side_encoder
    if encoder is None:
        raise InvalidInputError(f"release {manifest.release} has no side-information encoder")
    return SideEncoder(open_session(files, encoder.file, threads), manifest, encoder.dim)


def open_upgrade(
    files: Files, manifest: "Manifest", upgrade: "Upgrade", *, int8: bool = False, threads: int = 1
) -> UpgradeModel:
    """Load an upgrade of `manifest` on the CPU; with `int8` its quantised twin.

    Raises VerificationError; InvalidInputError where there is no quantised twin.
    """
    file = upgrade.int8_file if int8 else upgrade.file
    if file is None:
        raise InvalidInputError(
            f"the upgrade {upgrade.from_release} to {manifest.release} was published without int8"
        )
    return UpgradeModel(open_session(files, file, threads), manifest, upgrade)


def no_vector(manifest: "Manifest | ImageModel") -> InvalidInputError:
    """The refusal of an image that a release's models turn into nothing that can be compared."""
    return InvalidInputError(
        f"image: the models of release {manifest.release} make no vector of it (zero, or not "
        "finite); leave out pictures of a single colour"
    )


def locate(files: Files, path: str) -> Path:
    """The local file of a published path. Raises VerificationError if a draft lacks it."""
    if isinstance(files, Path):
        return files / path
    if path not in files:
        raise VerificationError(f"{path}: the manifest names it, but no file was given for it")
    return files[path]


def read_verified(files: Files, file: File) -> bytes:
    """The bytes of a published file. Raises VerificationError for another length or digest."""
    path = locate(files, file.path)
    try:
        with path.open("rb") as handle:
            data = handle.read(file.length + 1)
    except OSError as error:
        raise VerificationError(f"{file.path}: cannot be read ({error.strerror})") from error
    if len(data) != file.length or sha256_bytes(data) != file.sha256:
        raise VerificationError(
            f"{file.path}: is not the file that was published; fetch or publish the release again"
        )
    return data


class Session:
    """An onnxruntime session on verified bytes; its own failures become ours."""

    def __init__(self, path: str, data: bytes, threads: int) -> None:
        from nobackfill.onnx_runtime import denormals_as_zero, state
        from nobackfill.onnx_runtime import onnxruntime as ort

        options = ort.SessionOptions()
        # Of the session's own threads; `run` does the same for the calling one.
        options.add_session_config_entry("session.set_denormal_as_zero", "1")
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._path = path
        self._failures = (
            state.Fail, state.InvalidArgument, state.InvalidGraph, state.InvalidProtobuf,
            state.NotImplemented, state.RuntimeException, state.EPFail, state.NoSuchFile,
            state.NoModel, state.ModelLoaded, RuntimeError, ValueError,
        )  # fmt: skip
        self._denormals_as_zero = denormals_as_zero
        try:
            # The first session of a process would leave the option on in the calling thread.
            with denormals_as_zero():
                self._session = ort.InferenceSession(
                    data, sess_options=options, providers=["CPUExecutionProvider"]
                )
        except self._failures as error:
            raise VerificationError(f"{path}: onnxruntime cannot load it ({error})") from error

    def run(self, inputs: dict[str, NDArray[Any]], outputs: list[str]) -> list[NDArray[Any]]:
        try:
            with self._denormals_as_zero():
                return list(self._session.run(outputs, inputs))
        except self._failures as error:
            raise VerificationError(f"{self._path}: onnxruntime cannot run it ({error})") from error


def open_session(files: Files, file: File, threads: int) -> Session:
    """A session on a published file. Raises VerificationError for another than the manifest's."""
    # A session from bytes: nobody can exchange the file between the check and the load, and a
    # model that points to other files has no folder to find them in.
    return Session(file.path, read_verified(files, file), threads)


def _check_images(images: Images, frame: Frame) -> Images:
    height, width = frame.height, frame.width
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1:] != (height, width, 3):
        raise InvalidInputError(
            f"images: expected uint8 [n, {height}, {width}, 3], got {array.dtype} "
            f"{list(array.shape)}"
        )
    return np.ascontiguousarray(array)


def checked_output(
    values: NDArray[Any], count: int, dim: int, name: str, *, unit: bool = False
) -> Vectors:
    """A model's output float32 [count,dim]. Raises VerificationError for no vectors of the space,
    UnusableOutputError where only some are none."""
    try:
        checked = check_vectors(values, dim, what=f"model output {name!r}", unit=unit)
    except UnusableRowsError as error:
        raise UnusableOutputError(str(error), error.rows) from error
    except InvalidInputError as error:
        raise VerificationError(str(error)) from error
    if len(checked) != count:
        raise VerificationError(f"model output {name!r}: expected {count} rows, got {len(checked)}")
    return checked


def _check_uncertainty(values: NDArray[Any], count: int) -> Vectors:
    if values.shape != (count,) or not np.isfinite(values).all():
        raise VerificationError(
            f"model output 'uncertainty': expected {count} finite values, got {list(values.shape)}"
        )
    return np.ascontiguousarray(values, dtype=np.float32)
