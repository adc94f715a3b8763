"""Run the ONNX files of a release: check the digest, open a session, check every output."""

import os
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
    # Importing pydantic takes longer than a device's search: see image_model.py.
    from nobackfill.release.manifest import Manifest, QueryAdapter, Upgrade

# A publication folder, or for a draft the local file of each published path.
Files = Path | Mapping[str, Path]

Images = NDArray[np.uint8]

# Rows of one call of an upgrade, on a device, in a gateway and in a trial.
CHUNK_ROWS = 1024


@dataclass(frozen=True)
class Upgraded:
    """The output of an upgrade.

    Attributes:
        embedding: float32 [n, dim].
        side_information: Side-information, float32 [n, side_dim]; None if there is none.
        uncertainty: float32 [n], larger is less certain; None if the upgrade predicts none.
    """

    embedding: Vectors
    side_information: Vectors | None
    uncertainty: Vectors | None


class ImageEmbedder:
    """The image embedder phi_N; opened by `open_embedder`."""

    def __init__(self, session: "Session", model: ImageModel) -> None:
        self._session = session
        self._model = model
        self.dim = model.dim

    def run(self, images: Images) -> Vectors:
        """Embed images.

        Threads may call it at the same time. The images are not changed.

        Args:
            images: uint8 [n, H, W, 3] of the release's size, n at least 1.

        Returns:
            float32 [n, dim], in the order of `images`.

        Raises:
            InvalidInputError: Another shape or dtype.
            VerificationError: onnxruntime cannot run the model, or its output has another shape.
            UnusableOutputError: Some outputs are no vectors of the space; the error lists the rows.
        """
        checked = _check_images(images, self._model.frame)
        (embedding,) = self._session.run({"image": checked}, ["embedding"])
        return check_output(
            embedding, len(checked), self.dim, "embedding", unit_norm=self._model.unit_norm
        )


class SideEncoder:
    """The side-information encoder psi_N; opened by `open_side_encoder`."""

    def __init__(self, session: "Session", manifest: "Manifest", dim: int) -> None:
        self._session = session
        self._frame = manifest.frame
        self.dim = dim

    def run(self, images: Images) -> Vectors:
        """Compute the side-information of images.

        Threads may call it at the same time. The images are not changed.

        Args:
            images: uint8 [n, H, W, 3] of the release's size, n at least 1.

        Returns:
            float32 [n, side_dim], in the order of `images`.

        Raises:
            InvalidInputError: Another shape or dtype.
            VerificationError: onnxruntime cannot run the model, or its output has another shape.
            UnusableOutputError: Some outputs are no vectors; the error lists the rows.
        """
        checked = _check_images(images, self._frame)
        (side,) = self._session.run({"image": checked}, ["side"])
        return check_output(side, len(checked), self.dim, "side")


class UpgradeModel:
    """The model of an upgrade M->N; opened by `open_upgrade`."""

    def __init__(self, session: "Session", manifest: "Manifest", upgrade: "Upgrade") -> None:
        self._session = session
        self._manifest = manifest
        self.upgrade = upgrade
        self._outputs = [name for name, _, _ in manifest.upgrade_interface(upgrade)[1]]

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """Upgrade embeddings into the target's space.

        Threads may call it at the same time. The arguments are not changed.

        Args:
            embedding: float32 or float64 [n, from_dim], n at least 1.
            side: Side-information, float32 [n, from_side_dim]; None allowed if the upgrade does not
                read it. An upgrade that does not read it does not check it.

        Returns:
            n rows in the order of `embedding`. `side_information` is new, the argument unchanged
            where the upgrade carries it, or None where it drops it. `uncertainty` is None where the
            upgrade predicts none.

        Raises:
            InvalidInputError: Another shape or dtype, a value that is not finite
                (UnusableRowsError, which lists the rows), or missing side-information.
            VerificationError: onnxruntime cannot run the model, its output has another shape, or an
                uncertainty is not finite.
            UnusableOutputError: Some outputs are no vectors of the space; the error lists the rows.
        """
        upgrade = self.upgrade
        inputs = {
            "embedding": check_vectors(
                embedding, upgrade.from_dim, error_name="embedding to upgrade"
            )
        }
        count = len(inputs["embedding"])
        if upgrade.reads_side:
            if side is None or len(side) != count:
                raise InvalidInputError(
                    f"upgrade from release {upgrade.from_release}: expected {count} rows of "
                    "side-information, one for each vector, got "
                    f"{'none' if side is None else len(side)}; read the side-information from the "
                    "gallery together with the vectors"
                )
            inputs["side"] = check_vectors(
                side, upgrade.from_side_dim, error_name="side-information to upgrade"
            )
        values = dict(zip(self._outputs, self._session.run(inputs, self._outputs), strict=True))
        spec = self._manifest.embedder
        return Upgraded(
            check_output(values["upgraded"], count, spec.dim, "upgraded", unit_norm=spec.unit),
            self._side(values, count, side),
            _check_uncertainty(values["uncertainty"], count) if "uncertainty" in values else None,
        )

    def _side(
        self, values: dict[str, NDArray[Any]], count: int, side: Vectors | None
    ) -> Vectors | None:
        encoder = self._manifest.side_encoder
        if self.upgrade.side == "maps" and encoder is not None:
            return check_output(values["upgraded_side"], count, encoder.dim, "upgraded_side")
        return side if self.upgrade.side == "carries" else None


class AdapterModel:
    """The model of a query adapter; opened by `open_adapter`."""

    def __init__(self, session: "Session", manifest: "Manifest", adapter: "QueryAdapter") -> None:
        self._session = session
        self._dim = manifest.embedder.dim
        self._adapter = adapter

    def run(self, queries: Vectors) -> Vectors:
        """Map queries of the release to the older space.

        Threads may call it at the same time. The argument is not changed.

        Args:
            queries: float32 or float64 [n, dim], n at least 1.

        Returns:
            float32 [n, to_dim], in the order of `queries`.

        Raises:
            InvalidInputError: Another shape or dtype, or a value that is not finite
                (UnusableRowsError, which lists the rows).
            VerificationError: onnxruntime cannot run the model, or its output has another shape.
            UnusableOutputError: Some outputs are no vectors of the older space; the error lists the
                rows.
        """
        checked = check_vectors(queries, self._dim, error_name="query to adapt")
        (adapted,) = self._session.run({"embedding": checked}, ["adapted"])
        adapter = self._adapter
        return check_output(
            adapted, len(checked), adapter.to_dim, "adapted", unit_norm=adapter.to_unit
        )


def count_cores() -> int:
    """Return the number of processor cores that this process may use, for `threads`; at least 1.

    It is the process's affinity; limits of containers on processor time are not counted. Linux
    only.
    """
    return len(os.sched_getaffinity(0))


def open_embedder(files: Files, manifest: "Manifest", threads: int = 1) -> ImageEmbedder:
    """Load the image embedder of a release on the CPU.

    Reads the file once; golden probes are not run. The model needs no closing.

    Args:
        files: The publication folder or the draft's files.
        manifest: The release.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from the manifest's, or
            cannot be loaded.
        NoEncoderError: The release embeds no images.
    """
    return open_image_model(files, ImageModel.of(manifest), threads)


def open_image_model(files: Files, model: ImageModel, threads: int = 1) -> ImageEmbedder:
    """Load an image embedder that `ImageModel` describes on the CPU.

    Args:
        files: The publication folder or the draft's files.
        model: The embedder.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from its digest, or cannot
            be loaded.
    """
    return ImageEmbedder(open_session(files, model.file, threads), model)


def open_side_encoder(files: Files, manifest: "Manifest", threads: int = 1) -> SideEncoder:
    """Load the side-information encoder of a release on the CPU.

    Reads the file once. The model needs no closing.

    Args:
        files: The publication folder or the draft's files.
        manifest: The release.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from the manifest's, or
            cannot be loaded.
        InvalidInputError: The release has no such encoder.
        NoEncoderError: The release embeds no images.
    """
    encoder = manifest.side_encoder
    if encoder is None:
        raise InvalidInputError(
            f"release {manifest.release} has no encoder of side-information; use a release that "
            "was published with one"
        )
    return SideEncoder(open_session(files, encoder.file, threads), manifest, encoder.dim)


def open_upgrade(
    files: Files, manifest: "Manifest", upgrade: "Upgrade", *, int8: bool = False, threads: int = 1
) -> UpgradeModel:
    """Load the model of an upgrade on the CPU.

    Reads the file once. The model needs no closing.

    Args:
        files: The publication folder or the draft's files.
        manifest: The release that published the upgrade.
        upgrade: An upgrade of this release; this is not checked.
        int8: Load its quantised twin instead of the float32 file.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from the manifest's, or
            cannot be loaded.
        InvalidInputError: The upgrade has no quantised twin.
    """
    file = upgrade.int8_file if int8 else upgrade.file
    if file is None:
        raise InvalidInputError(
            f"the upgrade from release {upgrade.from_release} to {manifest.release} was published "
            "without int8; use its float32 file"
        )
    return UpgradeModel(open_session(files, file, threads), manifest, upgrade)


def open_adapter(
    files: Files, manifest: "Manifest", adapter: "QueryAdapter", threads: int = 1
) -> AdapterModel:
    """Load the model of a query adapter on the CPU.

    Reads the file once. The model needs no closing.

    Args:
        files: The publication folder or the draft's files.
        manifest: The release that published the adapter.
        adapter: An adapter of this release; this is not checked.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from the manifest's, or
            cannot be loaded.
    """
    return AdapterModel(open_session(files, adapter.file, threads), manifest, adapter)


def no_vector_error(manifest: "Manifest | ImageModel") -> InvalidInputError:
    """Return, without raising it, the error for an image of which the release's model makes no
    usable vector."""
    return InvalidInputError(
        f"image: the models of release {manifest.release} return no usable vector for this image "
        "(zero, or not finite), which is common for images of a single colour; leave the image out"
    )


def locate_file(files: Files, path: str) -> Path:
    """Return the local file of a published path.

    Args:
        files: The publication folder or the draft's files.
        path: The published path; it is not checked, so a path from outside must be plain
            (`is_plain_path`).

    Raises:
        VerificationError: The draft has no such file. In a folder, the file may be missing.
    """
    if isinstance(files, Path):
        return files / path
    if path not in files:
        raise VerificationError(
            f"{path}: the manifest names this file, but no file was given for it in the draft; "
            "export the release again"
        )
    return files[path]


def read_verified_file(files: Files, file: File) -> bytes:
    """Read a published file and check its length and digest.

    Reads at most one byte more than the entry's length.

    Args:
        files: The publication folder or the draft's files.
        file: Its entry in the manifest.

    Returns:
        All its bytes.

    Raises:
        VerificationError: It is missing, cannot be read, or differs from the entry.
    """
    path = locate_file(files, file.path)
    try:
        with path.open("rb") as handle:
            data = handle.read(file.length + 1)
    except OSError as error:
        raise VerificationError(
            f"{file.path}: this file of the release cannot be read ({error.strerror}); check its "
            "permissions, or fetch the release again if it is missing"
        ) from error
    if len(data) != file.length or sha256_bytes(data) != file.sha256:
        raise VerificationError(
            f"{file.path}: expected the file with the digest that the release's manifest names, "
            "got another one; fetch or publish the release again"
        )
    return data


class Session:
    """An onnxruntime session on verified bytes; raises errors of this project.

    Raises:
        VerificationError: onnxruntime cannot load the model.
    """

    def __init__(self, path: str, data: bytes, threads: int) -> None:
        from nobackfill.onnx_runtime import denormals_as_zero, state
        from nobackfill.onnx_runtime import onnxruntime as ort

        options = ort.SessionOptions()
        # For the session's own threads; `run` does the same for the calling thread.
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
            raise VerificationError(
                f"{path}: onnxruntime cannot load this model ({error}); publish the release again"
            ) from error

    def run(self, inputs: dict[str, NDArray[Any]], outputs: list[str]) -> list[NDArray[Any]]:
        """Run the model on the CPU.

        Threads may call it at the same time. Denormal numbers count as 0 during the call.

        Args:
            inputs: Arrays by input name, [n, ...], of the dtypes and shapes that the graph
                declares.
            outputs: Names of the outputs.

        Returns:
            The outputs in this order, [n, ...], unchecked.

        Raises:
            VerificationError: onnxruntime cannot run the model on these inputs, such as another
                dtype, shape or name, or too little memory.
        """
        try:
            with self._denormals_as_zero():
                return list(self._session.run(outputs, inputs))
        except self._failures as error:
            raise VerificationError(
                f"{self._path}: onnxruntime cannot run this model ({error}); publish the release "
                "again"
            ) from error


def open_session(files: Files, file: File, threads: int) -> Session:
    """Open a session on a published file. It needs no closing.

    Args:
        files: The publication folder or the draft's files.
        file: Its entry in the manifest.
        threads: Threads of the session, at least 1.

    Raises:
        VerificationError: The file is missing, cannot be read, differs from its entry, or cannot be
            loaded.
    """
    # From bytes: the file cannot be replaced between check and load, and a model that refers to
    # other files has no folder to find them in.
    return Session(file.path, read_verified_file(files, file), threads)


def _check_images(images: Images, frame: Frame) -> Images:
    height, width = frame.height, frame.width
    array = np.asarray(images)
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[1:] != (height, width, 3):
        raise InvalidInputError(
            f"images: expected an array uint8 [n, {height}, {width}, 3], as the model reads "
            f"images, got {array.dtype} {list(array.shape)}; decode and resize the images to this "
            "form"
        )
    return np.ascontiguousarray(array)


def check_output(
    values: NDArray[Any], item_count: int, dim: int, name: str, *, unit_norm: bool = False
) -> Vectors:
    """Return a model's output as vectors, after checking it.

    A vector of zeros passes without `unit_norm`.

    Args:
        values: The output, of any shape and dtype.
        item_count: The expected number of rows.
        dim: The expected dimension.
        name: Name of the output, for messages.
        unit_norm: Whether each norm must be 1.

    Returns:
        float32 [item_count, dim], converted from float64; the same array where it is C-contiguous
        float32.

    Raises:
        VerificationError: Another shape, or a dtype other than float32 and float64.
        UnusableOutputError: Some rows have NaN, infinity, a norm above 1e15, or with `unit_norm` a
            norm that is not 1. The error lists the rows.
    """
    try:
        checked = check_vectors(
            values, dim, error_name=f"model output {name!r}", unit_norm=unit_norm
        )
    except UnusableRowsError as error:
        raise UnusableOutputError(str(error), error.unusable_rows) from error
    except InvalidInputError as error:
        raise VerificationError(str(error)) from error
    if len(checked) != item_count:
        raise VerificationError(
            f"model output {name!r}: expected {item_count} vectors, one for each input, got "
            f"{len(checked)}; export the model again"
        )
    return checked


def _check_uncertainty(values: NDArray[Any], count: int) -> Vectors:
    if values.shape != (count,) or not np.isfinite(values).all():
        raise VerificationError(
            f"model output 'uncertainty': expected {count} finite values, one for each input, got "
            f"the shape {list(values.shape)} or NaN; export the model again"
        )
    return np.ascontiguousarray(values, dtype=np.float32)
