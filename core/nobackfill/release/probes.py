"""Check a release's models: the rules for ONNX files, and the golden probes.

The ONNX check decides which files may become sessions. A crafted file may crash its parser or fill
the memory, so trial.py runs the check in a child with limits. Golden probes are inputs with the
outputs that they must give; they check the runtime of this machine.
"""

import io
import json
import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    Manifest,
    ModelInterface,
    PublishedFile,
    QueryAdapter,
    Tensor,
    TextRole,
    Upgrade,
)
from nobackfill.release.models import (
    Files,
    Images,
    locate_file,
    open_adapter,
    open_embedder,
    open_side_encoder,
    open_upgrade,
    read_verified_file,
)
from nobackfill.release.text_models import TextModel, open_text_encoder
from nobackfill.text import LARGEST_TEXT_BYTES as _LARGEST_TEXT
from nobackfill.text import check_text
from nobackfill.vectors import Vectors

# Unpacked size of a file of probes.
LARGEST_PROBE_BYTES = 256 * 2**20

Arrays = dict[str, NDArray[Any]]
# Embed images uint8 [n,H,W,3] of the release's size to float32 [n,d].
EncodeImages = Callable[[Images], Vectors]
# Embed texts, as queries or as documents, to float32 [n,d].
EncodeTexts = Callable[[Sequence[str], TextRole], Vectors]
# Largest number of texts in the probes.
_MOST_TEXTS = 64
# Texts of the largest allowed size in several scripts; `_SIGNS`: every sign of ASCII, for
# repetition.
_LONG_TEXTS = [
    (piece * _LARGEST_TEXT).encode()[:_LARGEST_TEXT].decode(errors="ignore")
    for piece in (
        "word ", "aA1. \n\t", "a" * 40 + "b", "e\u0301\u0323", "\u4e2d\u6587", "\ufdfa", "\x00a",
        "\U0001f469\u200d\U0001f680", "\u05e9\u05dc\u05d5\u05dd ", "\u0e44\u0e17\u0e22", "<s>[CLS]",
    )
]  # fmt: skip
_SIGNS = [chr(code) for code in range(33, 127)]
# For messages.
_PROBES = "golden probes of the release (test inputs with the outputs that its models must give)"


def check_probes(
    files: Files,
    manifest: Manifest,
    *,
    upgrades: Collection[int] | None = None,
    threads: int = 1,
    least_row_count: int = 0,
) -> None:
    """Run the models of a release on its golden probes, in this process.

    Checks the embedder, the text encoder, the side encoder, upgrades with their int8 twins, and
    query adapters, as far as `files` has them. An output is right if every |difference| <=
    tolerance * max(1, |expected|).

    A crafted file may end the process: `trial.try_release` runs this in a child.

    Args:
        files: The publication folder or the draft's files. A device has only some of the files: a
            model whose file is missing in a folder is skipped. A draft must have all of them.
        manifest: The release.
        upgrades: Check the upgrades from these releases; None: from all. Other numbers are ignored.
        threads: Threads of each session, at least 1.
        least_row_count: Upgrades run on at least this many rows, by repeating the probes: many
            rows may need more memory or time.

    Raises:
        VerificationError: A model or the file of probes is missing, differs from the manifest's,
            cannot be loaded, returns no usable vector (UnusableOutputError), or gives other
            outputs. Or a model refuses a probe, such as one of another shape. Or a tokenizer
            crashes, or has tokens that the model does not accept. The message names the model.
        ConfigurationError: The extra `text` is needed, and is not installed.
        MemoryError: A model needs more memory than there is.
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
    probes = _load(read_verified_file(files, manifest.probes.file), manifest.probes.file.path)
    for upgrade in manifest.upgrades:
        if upgrades is None or upgrade.from_release in upgrades:
            _check_upgrade(files, manifest, upgrade, probes, threads, least_row_count)
    for adapter in manifest.adapters:
        _check_adapter(files, manifest, adapter, probes, threads)


def check_encoders(
    files: Files, manifest: Manifest,
    embed_images: EncodeImages | None, encode_side: EncodeImages | None,
    embed_texts: EncodeTexts | None,
) -> None:  # fmt: skip
    """Compare the outputs of encoders, wherever they run, with the golden probes.

    The file of probes is read even if all checks are skipped.

    Args:
        files: The publication folder or the draft's files; only the probes are read.
        manifest: The release.
        embed_images: Embeds images; None skips this check.
        encode_side: Computes side-information of images; None skips this check.
        embed_texts: Embeds texts; called once for each role. None skips this check.

    Raises:
        VerificationError: An output differs or has another shape, or an encoder raises
            InvalidInputError for a probe. Or the file of probes is missing, damaged, larger than
            256 MiB or another one, or lacks an array. The message names it.
        Exception: Any other error of `embed_images`, `encode_side` and `embed_texts`.
    """
    probes = _load(read_verified_file(files, manifest.probes.file), manifest.probes.file.path)
    for name, encode in (("embedding", embed_images), ("side", encode_side)):
        if encode is not None:
            image = _array(probes, "image")
            with _refuse_probes(name):
                output = encode(image)
            _agree(name, _array(probes, name), output, manifest.probes.tolerance)
    if embed_texts is not None:
        texts = _texts(_array(probes, "text"))
        for role in TEXT_ROLES:
            with _refuse_probes(f"text/{role}"):
                output = embed_texts(texts, role)
            _agree(
                f"text/{role}", _array(probes, f"text/{role}"), output, manifest.probes.tolerance
            )


@contextmanager
def _refuse_probes(name: str) -> Iterator[None]:
    """Refuse the release where its model refuses one of its own probes."""
    try:
        yield
    except InvalidInputError as error:
        raise VerificationError(
            f"golden probe {name} (a test input of the release): the release's own model refuses "
            f"this input: {error}. The release is not used; its publisher must publish it again"
        ) from error


def make_text_probes(texts: Sequence[str], embed_texts: EncodeTexts) -> Arrays:
    """Make the golden probes of a text encoder: test texts with the vectors that it gives.

    Nothing is written.

    Args:
        texts: p inputs, 1 to 64; this is checked when they are read.
        embed_texts: The encoder; called once for each role. Its error is raised.

    Returns:
        The arrays `text` (uint8, the texts as JSON), `text/query` and `text/document` (each float32
        [p, dim]).
    """
    data = np.frombuffer(json.dumps(list(texts)).encode(), np.uint8)
    return {"text": data, **{f"text/{role}": embed_texts(texts, role) for role in TEXT_ROLES}}


def _texts(data: NDArray[Any]) -> list[str]:
    try:
        texts = json.loads(data.astype(np.uint8).tobytes())
    except (ValueError, RecursionError) as error:
        raise VerificationError(
            f"{_PROBES}: expected the array 'text' to be JSON, got something else ({error}); "
            "publish the release again"
        ) from error
    if not isinstance(texts, list) or not 0 < len(texts) <= _MOST_TEXTS:
        raise VerificationError(
            f"{_PROBES}: expected a list of 1 to {_MOST_TEXTS} texts in the array 'text'; publish "
            "the release again"
        )
    try:
        return [check_text(text) for text in texts]
    except (InvalidInputError, AttributeError) as error:
        raise VerificationError(
            f"{_PROBES}: one of its texts cannot be used ({error}); publish the release again"
        ) from error


def _check_vocabulary(model: TextModel) -> None:
    """Check that the model accepts every token; an unknown one would crash whatever serves it."""
    for role in TEXT_ROLES:
        try:
            model.embed(model.reader.largest_token_inputs, role)
        except UnusableOutputError:
            # The token is known; a token alone may have no vector.
            continue
        except VerificationError as error:
            raise VerificationError(
                f"the release's text encoder: its tokenizer has tokens that its model does not "
                f"accept ({error}); publish the release again, with the model's own tokenizer.json"
            ) from error


def _check_tokenizer(model: TextModel) -> None:
    """Run the tokenizer on texts that people may write.

    A tokenizer that accepts the probes may still crash on other texts, or take any memory and time.
    It may refuse texts.
    """
    for text in (*_LONG_TEXTS, *(sign * 2**13 for sign in _SIGNS)):
        try:
            model.reader.tokenize([text], "document")
        except DefectiveTokenizerError as error:
            raise VerificationError(
                f"the release's text encoder: its tokenizer crashes on a text ({error}); publish "
                "the release again, with a sound tokenizer.json"
            ) from error
        except InvalidInputError:
            continue


def _check_upgrade(
    files: Files,
    manifest: Manifest,
    upgrade: Upgrade,
    probes: Arrays,
    threads: int,
    least_row_count: int,
) -> None:
    name = f"upgrade_{upgrade.from_release}"

    def repeat(which: str) -> NDArray[Any]:
        array = _array(probes, f"{name}/{which}")
        return np.resize(array, (max(least_row_count, len(array)), *array.shape[1:]))

    embedding = repeat("embedding")
    side = repeat("side") if upgrade.reads_side else None
    for int8, file in ((False, upgrade.file), (True, upgrade.int8_file)):
        if file is None or not _holds(files, file):
            continue
        tolerance = manifest.probes.int8_tolerance if int8 else manifest.probes.tolerance
        label = f"{name}{' int8' if int8 else ''}"
        model = open_upgrade(files, manifest, upgrade, int8=int8, threads=threads)
        with _refuse_probes(label):
            output = model.run(embedding, side)
        _agree(f"{label}/upgraded", repeat("upgraded"), output.embedding, tolerance)
        if upgrade.side == "maps" and output.side_information is not None:
            _agree(
                f"{label}/upgraded_side",
                repeat("upgraded_side"),
                output.side_information,
                tolerance,
            )


def _check_adapter(
    files: Files, manifest: Manifest, adapter: QueryAdapter, probes: Arrays, threads: int
) -> None:
    if not _holds(files, adapter.file):
        return
    name = f"adapter_{adapter.to_release}"
    model = open_adapter(files, manifest, adapter, threads)
    with _refuse_probes(name):
        output = model.run(_array(probes, f"{name}/embedding"))
    _agree(f"{name}/adapted", _array(probes, f"{name}/adapted"), output, manifest.probes.tolerance)


def _holds(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).is_file()


def _load(data: bytes, path: str) -> Arrays:
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            # The unpacked size may be a thousand times the download.
            if sum(member.file_size for member in members) > LARGEST_PROBE_BYTES:
                raise VerificationError(
                    f"{path}: expected golden probes of at most {LARGEST_PROBE_BYTES >> 20} MiB, "
                    "unpacked, got more; publish the release again with fewer"
                )
            return {m.filename.removesuffix(".npy"): _read(archive, m) for m in members}
    except (
        ValueError, OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError,
        NotImplementedError, RuntimeError, UnicodeError, OverflowError,
    ) as error:  # fmt: skip
        raise VerificationError(
            f"{path}: expected an .npz file with the golden probes of the release (test inputs "
            f"with the outputs that its models must give), got another or a damaged file ({error});"
            " publish the release again"
        ) from error


def _read(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> NDArray[Any]:
    """Read an array, after checking that its header claims what the member holds; numpy trusts
    it."""
    with archive.open(member) as file:
        npy = io.BytesIO(file.read(member.file_size))
    version = np.lib.format.read_magic(npy)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else None
    if header is None:
        raise ValueError(f"{member.filename}: expected an array of version 1.0, got {version}")
    shape, _, dtype = header(npy)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != member.file_size - npy.tell():
        raise ValueError(f"{member.filename}: its size differs from its header, {shape} {dtype}")
    npy.seek(0)
    return np.lib.format.read_array(npy, allow_pickle=False)


def _array(probes: Arrays, name: str) -> NDArray[Any]:
    if name not in probes or len(probes[name]) == 0:
        found = "an empty one" if name in probes else "none"
        raise VerificationError(
            f"{_PROBES}: expected an array {name!r} with at least one row, found {found}; publish "
            "the release again"
        )
    return probes[name]


def _agree(name: str, published: NDArray[Any], output: NDArray[Any], tolerance: float) -> None:
    if published.shape != output.shape:
        raise VerificationError(
            f"golden probe {name} of the release: its model must give the shape "
            f"{list(published.shape)} for the test inputs, and gives {list(output.shape)}; the "
            "release is not used. Its publisher must publish it again"
        )
    difference = np.abs(output - published) / np.maximum(1, np.abs(published))
    # Also refuses NaN among the published values.
    if not (difference <= tolerance).all():
        worst = np.fmax.reduce(difference, axis=None)
        raise VerificationError(
            f"golden probe {name}: on the release's test inputs, this machine's model outputs "
            f"differ from the published ones by {worst:.2g}, more than the tolerance "
            f"{tolerance:g}; the release is not used on this machine. Report this to its publisher"
        )


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file to check.

    Attributes:
        path: The file.
        inputs: The inputs that it must have.
        outputs: The outputs that it must have.
        longest_text_tokens: Length in tokens of the longest text, 1 without texts.
    """

    path: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    longest_text_tokens: int = 1


def check_onnx_rules(files: Mapping[str, OnnxFile]) -> None:
    """Check ONNX files against the rules of onnx_rules.py.

    A crafted file may end the process or fill its memory: `trial.try_release` checks in a child.

    Args:
        files: The files, by the name to use in messages; none: nothing is checked.

    Raises:
        VerificationError: The first broken rule, or a file that is missing, cannot be read, or is
            too large or too deep for this process.
    """
    # Importing onnx is slow, and most users of this module check no file.
    from nobackfill.release.onnx_rules import OnnxRuleError, check_onnx_file

    for name, file in files.items():
        try:
            check_onnx_file(file.path, file.inputs, file.outputs, file.longest_text_tokens)
        except OnnxRuleError as error:
            raise VerificationError(
                f"{name}: the ONNX file is refused: {error}. Its publisher must export it again"
            ) from error
        except (OSError, MemoryError, RecursionError) as error:
            raise VerificationError(
                f"{name}: the ONNX file is refused: it cannot be checked ({type(error).__name__}: "
                f"{error}). Check its permissions and this machine's memory, or ask its publisher "
                "to export it again"
            ) from error


def check_release(files: Files, manifest: Manifest) -> None:
    """Check every ONNX file of a release against the rules, as far as `files` has them.

    A crafted file may end the process: `trial.try_release` checks in a child.

    Args:
        files: The publication folder or the draft's files. In a folder, missing files are skipped.
        manifest: The release.

    Raises:
        VerificationError: A file breaks a rule, or a draft lacks it; the message names it.
    """
    checks: list[tuple[PublishedFile, ModelInterface]] = []
    if (images := manifest.embedder.file) is not None:
        checks.append((images, manifest.embedder_interface()))
    if (text := manifest.text_encoder) is not None:
        ends = manifest.text_encoder_interface(text)
        checks += [(text.model_file(role), ends) for role in TEXT_ROLES]
    if (encoder := manifest.side_encoder) is not None:
        checks.append((encoder.file, manifest.side_encoder_interface(encoder)))
    for upgrade in manifest.upgrades:
        ends = manifest.upgrade_interface(upgrade)
        checks.append((upgrade.file, ends))
        if upgrade.int8_file is not None:
            checks.append((upgrade.int8_file, ends))
    checks += [(one.file, manifest.adapter_interface(one)) for one in manifest.adapters]
    longest = 1 if text is None else text.length
    check_onnx_rules(
        {
            file.path: OnnxFile(locate_file(files, file.path), *ends, longest)
            for file, ends in checks
            if _is_there(files, file)
        }
    )


def _is_there(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).exists()
