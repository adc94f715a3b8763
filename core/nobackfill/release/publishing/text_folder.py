"""Read a folder that sentence-transformers saved, and export its Transformer to ONNX once.

`nobackfill embed` and `export.py` both read folders here. Static embeddings need no ONNX file. A
Transformer without one is exported in a child process with torch, into a cache. No code of the
folder is run, and no pickle is read.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.durable import (
    TEMPORARY_PREFIX,
    lock_file,
    make_dir,
    publish_dir,
    remove_temporary_files,
)
from nobackfill.errors import CannotWriteError, ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.release.manifest import TEXT_ROLES, TextRole
from nobackfill.release.publishing.declaration import (
    STATIC_MODULE,
    Declaration,
    read_static_declaration,
    read_text_declaration,
)
from nobackfill.release.publishing.sentence_head import WEIGHTS, read_model_file, read_tensors
from nobackfill.release.publishing.sentence_modules import MODULES, SentenceModule, read_modules
from nobackfill.terminal import escape_control
from nobackfill.vectors import Vectors

# Makes the ONNX file of a Transformer; it needs torch, and is run as a program.
_EXPORTER = "nobackfill.training.export.transformer_folder"
_NEEDS = ("torch", "transformers", "sentence_transformers", "onnxscript")
_GRAPH, _CHECK = "model.onnx", "check.npz"
# Outputs of an exported graph.
_OUTPUTS = ("token_embeddings",)
# Suffixes of files that determine the vectors.
_READ = {".json", ".safetensors", ".txt", ".model", ".jinja"}
# Suffixes of pickles: reading one runs its code.
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_EXPORTS = ("onnx", "openvino")
# An export of the largest model takes minutes; another process may be at it.
_PATIENCE = 3600.0
# The least cosine between a vector of the exported model and the library's.
_LEAST_COSINE = 0.9999
_BY_HAND = (
    'export it yourself (SentenceTransformer(NAME, backend="onnx").save_pretrained(FOLDER)), or '
    "embed by a Python function (`nobackfill embed --with module:function`)"
)


@dataclass(frozen=True)
class TextFiles:
    """Files and settings that determine the vectors of texts of one role.

    Attributes:
        weights: The model's files of weights, and others whose content counts.
        declaration: How they are used.
        tokenizer: The file of the tokenizer.
    """

    weights: tuple[Path, ...]
    declaration: Declaration
    tokenizer: Path


# A model that routes queries elsewhere has other files for each role.
RoleFiles = Mapping[TextRole, TextFiles]


# Opens an exported ONNX file for a role: a function from texts to vectors float32 [n, dim].
OpenExport = Callable[[Path, TextRole], Callable[[list[str]], Vectors]]


class TextFolder:
    """A folder with a model of texts, as sentence-transformers' save_pretrained() writes it.

    Args:
        folder: The folder, with modules.json.

    Raises:
        NotFoundError: It has no modules.json.
        InvalidInputError: A file cannot be read or has unexpected content, or a Router holds code
            of its own, or has no route for documents or for queries.
    """

    def __init__(self, folder: Path) -> None:
        if not (folder / MODULES).is_file():
            raise NotFoundError(
                f"{folder}: expected a model that sentence-transformers saved ({MODULES}) or "
                f"model2vec ({WEIGHTS} with `embeddings`); save it with its library, or name its "
                "ONNX file"
            )
        self._folder = folder
        self._modules = {role: read_modules(folder, role) for role in TEXT_ROLES}

    def is_static(self, role: TextRole) -> bool:
        """Return whether texts of a role pass a table of static embeddings, no Transformer."""
        return self._modules[role][0].kind == STATIC_MODULE

    @property
    def shipped_onnx_file(self) -> Path | None:
        """Return the folder's own ONNX file if it stands for the whole Transformer of both roles.

        It is `onnx/model.onnx` or `model.onnx`; None without one, and for static embeddings, routes
        and a Transformer in a folder of its own.
        """
        first = self._modules["document"][0]
        if (
            first.kind == STATIC_MODULE
            or first.path
            or self._modules["query"] != self._modules["document"]
        ):
            return None
        places = (self._folder / "onnx" / _GRAPH, self._folder / _GRAPH)
        return next((place for place in places if place.is_file()), None)

    @cached_property
    def files_by_role(self) -> RoleFiles:
        """Return what determines the vectors of each role, without an ONNX file; read once.

        Raises:
            InvalidInputError: The model has modules or settings that are not applied here, or no
                safetensors.
            NotFoundError: The tokenizer is missing.
            OSError: The folder of the static embeddings is missing.
        """
        return {role: self._role_files(role) for role in TEXT_ROLES}

    def _role_files(self, role: TextRole) -> TextFiles:
        first = self._modules[role][0]
        place = self._folder / first.path
        if first.kind == STATIC_MODULE:
            declared = read_static_declaration(self._folder, role)
            weights = [place / WEIGHTS]
        else:
            declared = read_text_declaration(self._folder / _GRAPH, _OUTPUTS, role)
            weights = [*sorted(place.glob("*.safetensors")), place / "config.json"]
        if not weights[0].is_file() or weights[0].suffix != ".safetensors":
            raise InvalidInputError(_no_weights(place))
        tokenizer = self._folder / declared.tokenizer
        if not tokenizer.is_file():
            raise NotFoundError(
                f"{tokenizer}: no such file; load the model with its library and save it again, "
                "which writes the tokenizer"
            )
        return TextFiles(tuple(weights), declared, tokenizer)

    def onnx_file(self, role: TextRole, open_for_check: OpenExport) -> Path:
        """Return the ONNX file of the Transformer that texts of a role pass.

        The first call for each state of the folder exports it, which takes seconds to minutes;
        later calls take it from the cache. Its vectors are compared with the library's before it
        enters the cache. Processes that start at once share one export. A line on stderr names the
        cost before an export begins.

        Args:
            role: The role, whose first module is a Transformer.
            open_for_check: Opens the file to compare the vectors of both roles.

        Returns:
            The file, with the output `token_embeddings` float32 [n, tokens, dim].

        Raises:
            InvalidInputError: The export would read a pickle or another model, it fails, or it
                gives other vectors than the library.
            ConfigurationError: Packages for the export are not installed.
            BusyError: Another process exports the model for longer than an hour.
            CannotWriteError: The cache cannot be written.
            OSError: A file of the model cannot be read, the child process cannot be started, or the
                temporary folder in the cache cannot be made.
            Exception: Any error of `open_for_check`; nothing is cached then.
        """
        folder, transformer = self._folder, self._modules[role][0]
        roles = [one for one in TEXT_ROLES if self._modules[one][0] == transformer]
        digest = _digest(folder)
        name = sha256_bytes(f"{digest}\n{transformer.path}".encode())
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nobackfill"
        target = cache / "onnx" / name
        if (target / _GRAPH).is_file():
            return target / _GRAPH
        _check_exportable(folder, transformer)
        try:
            make_dir(target.parent, 0o700)
        except CannotWriteError as error:
            raise CannotWriteError(
                f"{error}; the ONNX export of {folder} is cached in this folder. Make it writable, "
                "or name another one by the environment variable XDG_CACHE_HOME"
            ) from error
        mib = sum(file.stat().st_size for file in self.files_by_role[role].weights) >> 20
        cost = f"about {30 + mib // 30} s of a processor and {1 + mib / 190:.1f} GiB of memory"
        message = f"{folder}: exports its model ({mib} MiB) to ONNX once, with torch; takes {cost}"
        print(escape_control(message), file=sys.stderr, flush=True)
        with lock_file(target.with_name(f"{name}.lock"), _PATIENCE):
            if (target / _GRAPH).is_file():
                return target / _GRAPH
            remove_temporary_files(target.parent, name)
            work = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{name}-", dir=target.parent))
            try:
                _run_exporter(folder, work, roles)
                _compare(work, folder, roles, open_for_check)
                (work / _CHECK).unlink()
                if _digest(folder) != digest:
                    raise InvalidInputError(
                        f"{folder}: changed while it was exported; run the command again"
                    )
                publish_dir(work, target)
            finally:
                remove_temporary_files(target.parent, name)
        return target / _GRAPH


def is_model2vec(folder: Path) -> bool:
    """Tell whether model2vec saved a folder, rather than sentence-transformers.

    model2vec writes modules.json, too. Only the header of the weights is read. Without weights,
    config.json or tokenizer.json the answer is no.

    Raises:
        InvalidInputError: The weights cannot be read, or are no file of safetensors.
    """
    file = folder / WEIGHTS
    if not all(one.is_file() for one in (file, folder / "config.json", folder / "tokenizer.json")):
        return False
    try:
        with file.open("rb") as opened:
            names = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        if not isinstance(names, dict):
            raise ValueError("its header is no JSON object")
    except OSError as error:
        raise InvalidInputError(
            f"{file}: cannot be read ({error.strerror}); check its name and permissions"
        ) from error
    except (ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise InvalidInputError(
            f"{file}: expected weights in the format safetensors, found a file that cannot be read "
            f"as such ({error}); download the model again, or save the model again with its library"
        ) from error
    return "embeddings" in names


def read_embedding_table(file: Path) -> Vectors:
    """Read the table of static embeddings.

    model2vec may store fewer rows than tokens, with the row and the weight of each token.

    Args:
        file: The file of safetensors.

    Returns:
        The vector of each token, float32 [tokens, dim].

    Raises:
        InvalidInputError: It cannot be read, or holds no table.
    """
    tensors = read_tensors(read_model_file(file), file)
    table: Any = tensors.get("embedding.weight", tensors.get("embeddings"))
    if table is None or table.ndim != 2:
        raise InvalidInputError(
            f"{file}: expected a table 'embedding.weight' or 'embeddings' [tokens, dim], found "
            f"{', '.join(sorted(tensors)) or 'no tensor'}; save the model again by its library"
        )
    try:
        if "mapping" in tensors:
            table = table[tensors["mapping"].astype(np.int64)]
        if "weights" in tensors:
            table = table * tensors["weights"].astype(np.float32)[:, None]
    except (IndexError, ValueError) as error:
        raise InvalidInputError(
            f"{file}: the rows of its table and its tensors `mapping` and `weights` differ in "
            f"number ({error}); save the model again by its library"
        ) from error
    return np.asarray(table, np.float32)


def _no_weights(folder: Path) -> str:
    pickles = [one.name for one in sorted(folder.iterdir()) if one.suffix in _PICKLES]
    found = f"{pickles[0]}, a pickle, which is never read" if pickles else "none"
    return (
        f"{folder}: expected the model's weights as {WEIGHTS}, found {found}; load the model with "
        "its library and save it again"
    )


def _digest(folder: Path) -> str:
    """Return a digest of all files in a folder that may determine its vectors, with their names."""
    lines = [
        f"{file.relative_to(folder).as_posix()} {sha256_file(file)}"
        for file in sorted(folder.rglob("*"))
        if file.suffix in _READ and file.is_file() and not _apart(file, folder)
    ]
    return sha256_bytes("\n".join(lines).encode())


def _apart(file: Path, folder: Path) -> bool:
    """Tell whether a file belongs to an export, or is hidden."""
    parts = file.relative_to(folder).parts
    return parts[0] in _EXPORTS or any(part.startswith(".") for part in parts)


def _check_exportable(folder: Path, transformer: SentenceModule) -> None:
    """Raise an error if the export would need a package, a pickle or another model."""
    missing = [package for package in _NEEDS if find_spec(package) is None]
    if missing:
        raise ConfigurationError(
            f"{folder}: has no ONNX file ({_GRAPH} or onnx/{_GRAPH}), and exporting one needs "
            f"{', '.join(missing)}, which is not installed: pip install '.[sentence-transformers]' "
            "in the folder of nobackfill's source"
        )
    if (folder / transformer.path / "adapter_config.json").is_file():
        raise InvalidInputError(
            f"{folder}: is an adapter (PEFT) of another model; merge both and save the result"
        )
    for file in sorted(folder.rglob("*")):
        pickle = file.suffix in _PICKLES and not _apart(file, folder)
        if pickle and not any(file.parent.glob("*.safetensors")):
            raise InvalidInputError(_no_weights(file.parent))


def _run_exporter(folder: Path, out: Path, roles: Sequence[TextRole]) -> None:
    """Export in a child process: torch stays out of this one, and its memory is freed.

    The child ends when this process is killed, because its stdin ends then.
    """
    stdin, kept_open = os.pipe()
    try:
        done = subprocess.run(
            # -P: a folder in which the command is run lends no module.
            [sys.executable, "-P", "-m", _EXPORTER, str(folder.absolute()), str(out), *roles],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
            stdin=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    finally:
        os.close(stdin)
        os.close(kept_open)
    if done.returncode == 0 and (out / _GRAPH).is_file() and (out / _CHECK).is_file():
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = lines[-1][:500] if lines else f"its process ended with {done.returncode}"
    if "trust_remote_code" in done.stderr:
        why = "it has code of its own, which is never run here"
    raise InvalidInputError(f"{folder}: cannot be exported to ONNX ({why}); {_BY_HAND}")


def _compare(out: Path, folder: Path, roles: Sequence[TextRole], open_export: OpenExport) -> None:
    """Compare vectors of the exported model with those of the library, for each role.

    Raises:
        InvalidInputError: They differ.
    """
    with np.load(out / _CHECK) as check:
        texts = [str(text) for text in check["texts"]]
        for role in roles:
            wanted, embed = check[role], open_export(out / _GRAPH, role)
            # Together, so that all but the longest are padded, and one by one.
            for made in (embed(texts), np.concatenate([embed([text]) for text in texts])):
                cosine = _least_cosine(made, wanted)
                if not cosine >= _LEAST_COSINE:
                    raise InvalidInputError(
                        f"{folder}: its exported ONNX file gives other vectors than "
                        f"sentence-transformers (cosine {cosine:.4f} for a {role}, expected at "
                        f"least {_LEAST_COSINE}); {_BY_HAND}"
                    )


def _least_cosine(some: Vectors, others: Vectors) -> float:
    """Return the least cosine of two rows; nan where shapes differ or a vector is zero."""
    if some.shape != others.shape:
        return float("nan")
    norms = np.linalg.norm(some, axis=1) * np.linalg.norm(others, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(((some * others).sum(1) / norms).min())
