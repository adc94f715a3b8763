"""The checks that a release's models must pass: the ONNX check and the golden probes.

The ONNX check decides what a model file may be before any session is made. A crafted file may crash
or fill whatever parses it: trial.py runs the check in a child with limits. Golden probes are inputs
with the outputs they must give, to check a machine's own runtime.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nobackfill.errors import (
    DefectiveTokenizerError,
    InvalidInputError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.release.manifest import (
    TEXT_ROLES,
    Ends,
    Manifest,
    PublishedFile,
    Tensor,
    TextRole,
    Upgrade,
)
from nobackfill.release.models import (
    Files,
    Images,
    locate,
    open_embedder,
    open_side_encoder,
    open_upgrade,
    read_verified,
)
from nobackfill.release.text_models import TextModel, open_text_encoder
from nobackfill.text import LARGEST_BYTES as _LARGEST_TEXT
from nobackfill.text import check_text
from nobackfill.vectors import Vectors

# Unpacked.
LARGEST_BYTES = 256 * 2**20

Arrays = dict[str, NDArray[Any]]
# Images uint8 [n,H,W,3] of the release's size to vectors float32 [n,d].
Encode = Callable[[Images], Vectors]
# The same of texts, as queries or as documents.
EncodeTexts = Callable[[Sequence[str], TextRole], Vectors]
# Of the probes' texts.
_MOST_TEXTS = 64
# As long as texts may be, in several scripts; and every sign of ASCII over and over.
_LONG_TEXTS = [
    (piece * _LARGEST_TEXT).encode()[:_LARGEST_TEXT].decode(errors="ignore")
    for piece in (
        "word ", "aA1. \n\t", "a" * 40 + "b", "e\u0301\u0323", "\u4e2d\u6587", "\ufdfa", "\x00a",
        "\U0001f469\u200d\U0001f680", "\u05e9\u05dc\u05d5\u05dd ", "\u0e44\u0e17\u0e22", "<s>[CLS]",
    )
]  # fmt: skip
_SIGNS = [chr(code) for code in range(33, 127)]


def check_probes(
    files: Files,
    manifest: Manifest,
    *,
    upgrades: Collection[int] | None = None,
    threads: int = 1,
    rows: int = 0,
) -> None:
    """Run the release's models on its probes, here and now.

    Upgrades run on at least `rows` rows: the probes are repeated, since a model may need memory or
    time for many rows that it does not need for a few.

    Covers the embedder, the text encoder, the side encoder, the upgrades from the releases in
    `upgrades` (None: all) and their int8 twins, as far as `files` holds them: a device brings only
    what it needs. An output agrees when every |difference| <= tolerance * max(1, |expected|).
    Raises VerificationError naming the model that differs.
    """
    embed = side = read = None
    if manifest.embedder.file is not None and _holds(files, manifest.embedder.file):
        embed = open_embedder(files, manifest, threads).run
    if manifest.side_encoder is not None and _holds(files, manifest.side_encoder.file):
        side = open_side_encoder(files, manifest, threads).run
    if manifest.text_encoder is not None and _holds(files, manifest.text_encoder.file):
        model = open_text_encoder(files, manifest, threads)
        _check_vocabulary(model)
        _check_tokenizer(model)
        read = model.run
    check_encoders(files, manifest, embed, side, read)
    probes = _load(read_verified(files, manifest.probes.file), manifest.probes.file.path)
    for upgrade in manifest.upgrades:
        if upgrades is None or upgrade.from_release in upgrades:
            _check_upgrade(files, manifest, upgrade, probes, threads, rows)


def check_encoders(
    files: Files, manifest: Manifest, embed: Encode | None, side: Encode | None,
    read: EncodeTexts | None,
) -> None:  # fmt: skip
    """Compare what `embed`, `side` and `read` give, wherever they run, with the published outputs.

    None leaves one out. Raises VerificationError naming the one that differs.
    """
    probes = _load(read_verified(files, manifest.probes.file), manifest.probes.file.path)
    for name, encode in (("embedding", embed), ("side", side)):
        if encode is not None:
            got = encode(_array(probes, "image"))
            _agree(name, _array(probes, name), got, manifest.probes.tolerance)
    if read is not None:
        texts = _texts(_array(probes, "text"))
        for role in TEXT_ROLES:
            try:
                got = read(texts, role)
            except InvalidInputError as error:
                raise VerificationError(f"golden probe text/{role}: {error}") from error
            _agree(f"text/{role}", _array(probes, f"text/{role}"), got, manifest.probes.tolerance)


def text_probes(texts: Sequence[str], read: EncodeTexts) -> Arrays:
    """What probes of a text encoder hold."""
    data = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
    return {"text": data, **{f"text/{role}": read(texts, role) for role in TEXT_ROLES}}


def _texts(data: NDArray[Any]) -> list[str]:
    try:
        texts = json.loads(data.astype(np.uint8).tobytes())
    except (ValueError, RecursionError) as error:
        raise VerificationError(f"golden probes: their texts are no JSON ({error})") from error
    if not isinstance(texts, list) or not 0 < len(texts) <= _MOST_TEXTS:
        raise VerificationError(f"golden probes: expected 1 to {_MOST_TEXTS} texts")
    try:
        return [check_text(text) for text in texts]
    except (InvalidInputError, AttributeError) as error:
        raise VerificationError(f"golden probes: {error}") from error


def _check_vocabulary(model: TextModel) -> None:
    """A token that the model does not know would end, or fail, what serves it."""
    for role in TEXT_ROLES:
        try:
            model.embed(model.reader.outermost, role)
        except UnusableOutputError:
            # It is known: that it has no vector by itself says nothing.
            continue
        except VerificationError as error:
            raise VerificationError(
                f"text encoder: its tokenizer has tokens that its model does not take ({error}); "
                "refused. Publish it with its own tokenizer.json"
            ) from error


def _check_tokenizer(model: TextModel) -> None:
    """Have the tokenizer read what people may write: a tokenizer that takes the probes may still
    crash, or take any memory and time, on other texts. Texts that it refuses are no fault of it."""
    for text in (*_LONG_TEXTS, *(sign * 2**13 for sign in _SIGNS)):
        try:
            model.reader.feed([text], "document")
        except DefectiveTokenizerError as error:
            raise VerificationError(
                f"text encoder: {error}; refused. Publish it with a sound tokenizer.json"
            ) from error
        except InvalidInputError:
            continue


def _check_upgrade(
    files: Files, manifest: Manifest, upgrade: Upgrade, probes: Arrays, threads: int, rows: int
) -> None:
    name = f"upgrade_{upgrade.from_release}"

    def repeated(which: str) -> NDArray[Any]:
        array = _array(probes, f"{name}/{which}")
        return np.resize(array, (max(rows, len(array)), *array.shape[1:]))

    embedding = repeated("embedding")
    side = repeated("side") if upgrade.reads_side else None
    for int8, file in ((False, upgrade.file), (True, upgrade.int8_file)):
        if file is None or not _holds(files, file):
            continue
        tolerance = manifest.probes.int8_tolerance if int8 else manifest.probes.tolerance
        label = f"{name}{' int8' if int8 else ''}"
        model = open_upgrade(files, manifest, upgrade, int8=int8, threads=threads)
        got = model.run(embedding, side)
        _agree(f"{label}/upgraded", repeated("upgraded"), got.embedding, tolerance)
        if upgrade.side == "maps" and got.side is not None:
            _agree(f"{label}/upgraded_side", repeated("upgraded_side"), got.side, tolerance)


def _holds(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).is_file()


def _load(data: bytes, path: str) -> Arrays:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            # What is unpacked may be a thousand times what was downloaded.
            if sum(member.file_size for member in members) > LARGEST_BYTES:
                raise VerificationError(
                    f"{path}: expected golden probes of at most {LARGEST_BYTES >> 20} MiB"
                )
            return {m.filename.removesuffix(".npy"): _read(archive, m) for m in members}
    except (
        ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError,
        NotImplementedError, RuntimeError, UnicodeError, OverflowError,
    ) as error:  # fmt: skip
        raise VerificationError(f"{path}: is not a file of golden probes ({error})") from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """One array; its header must not claim more than the member holds, as numpy believes it."""
    with archive.open(member) as file:
        npy = io.BytesIO(file.read(member.file_size))
    version = np.lib.format.read_magic(npy)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
    if header is None:
        raise ValueError(f"{member.filename}: expected an array of version 1.0, got {version}")
    shape, _, dtype = header(npy)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != member.file_size - npy.tell():
        raise ValueError(f"{member.filename}: holds other than the {shape} {dtype} it declares")
    npy.seek(0)
    return np.lib.format.read_array(npy, allow_pickle=False)


def _array(probes: Arrays, name: str) -> NDArray[Any]:
    if name not in probes or len(probes[name]) == 0:
        raise VerificationError(f"golden probes: expected an array {name!r} with at least one row")
    return probes[name]


def _agree(name: str, expected: NDArray[Any], got: NDArray[Any], tolerance: float) -> None:
    if expected.shape != got.shape:
        raise VerificationError(
            f"golden probe {name}: expected shape {list(expected.shape)}, got {list(got.shape)}"
        )
    difference = np.abs(got - expected) / np.maximum(1, np.abs(expected))
    # Also refuses NaN among the expected values.
    if not (difference <= tolerance).all():
        worst = np.fmax.reduce(difference, axis=None)
        raise VerificationError(
            f"golden probe {name}: this machine's outputs differ from the published ones by "
            f"{worst:.2g}, allowed is {tolerance:g}; the release stays unused here"
        )


@dataclass(frozen=True)
class OnnxFile:
    """A file to check, with the inputs and outputs that it must have."""

    path: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    # Tokens of the longest text that it is given.
    longest: int = 1


def check_onnx(files: Mapping[str, OnnxFile]) -> None:
    """Check files, by the names to be used in messages. Raises VerificationError."""
    # onnx takes a while to load, and most readers of this module never check a file.
    from nobackfill.release.onnx_rules import RefusedError, inspect

    for name, file in files.items():
        try:
            inspect(file.path, file.inputs, file.outputs, file.longest)
        except RefusedError as error:
            raise VerificationError(f"{name}: {error}; refused") from error
        except (OSError, MemoryError, RecursionError) as error:
            raise VerificationError(
                f"{name}: cannot be checked ({type(error).__name__}: {error}); refused"
            ) from error


def check_release(files: Files, manifest: Manifest) -> None:
    """Check every ONNX file of a release that `files` holds. Raises VerificationError naming it."""
    wanted: list[tuple[PublishedFile, Ends]] = []
    if (images := manifest.embedder.file) is not None:
        wanted.append((images, manifest.embedder_ends()))
    if (text := manifest.text_encoder) is not None:
        ends = manifest.text_encoder_ends(text)
        wanted += [(text.read_by(role), ends) for role in TEXT_ROLES]
    if (encoder := manifest.side_encoder) is not None:
        wanted.append((encoder.file, manifest.side_encoder_ends(encoder)))
    for upgrade in manifest.upgrades:
        ends = manifest.upgrade_ends(upgrade)
        wanted.append((upgrade.file, ends))
        if upgrade.int8_file is not None:
            wanted.append((upgrade.int8_file, ends))
    longest = 1 if text is None else text.length
    check_onnx(
        {
            file.path: OnnxFile(locate(files, file.path), *ends, longest)
            for file, ends in wanted
            if _is_there(files, file)
        }
    )


def _is_there(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).exists()
