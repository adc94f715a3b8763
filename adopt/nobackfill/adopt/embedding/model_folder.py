"""Open a folder that sentence-transformers or model2vec saved, also one without an ONNX file.

Static embeddings need no ONNX file. A Transformer without one is exported once, in a child process
with torch, into a cache; the modules behind it are applied here. No code of the folder is run, and
no pickle is read.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.adopt.embedding.static_model import Model2vecConfig, StaticModel, is_model2vec
from nobackfill.adopt.embedding.text_files import RoleFiles, TextFiles
from nobackfill.digests import sha256_bytes, sha256_file
from nobackfill.durable import (
    TEMPORARY_PREFIX,
    lock_file,
    make_dir,
    publish_dir,
    remove_temporary_files,
)
from nobackfill.errors import (
    CannotWriteError,
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
)
from nobackfill.release.manifest import TEXT_ROLES, TextRole
from nobackfill.release.publishing.declaration import (
    STATIC,
    Declaration,
    read_declaration,
    read_static_declaration,
)
from nobackfill.release.publishing.sentence_head import WEIGHTS
from nobackfill.release.publishing.sentence_modules import (
    MODULES,
    SentenceModule,
    parse_model_file,
    read_modules,
)

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
    "name a Python function as module:function"
)


def open_model_folder(folder: Path, *, queries: bool = False) -> OnnxModel | StaticModel:
    """Open a folder with a model of texts.

    A Transformer with `onnx/model.onnx` or `model.onnx` is opened like that file. Without one, the
    first call exports it, which takes up to minutes; later calls take it from the cache.

    Args:
        folder: The folder, as the library's save_pretrained() writes it.
        queries: Whether the texts are queries.

    Raises:
        NotFoundError: The folder has no model, or a file of it is missing.
        InvalidInputError: A file cannot be used; the model has modules, code or pickles that are
            not applied here; or its export fails, or gives other vectors than the library.
        ConfigurationError: Packages for the export or another extra are not installed.
        BusyError: Another process exports the model for longer than an hour.
        CannotWriteError: The cache cannot be written.
        OSError: A file of the model cannot be read.
    """
    if _of_model2vec(folder):
        return _open_model2vec(folder, queries=queries)
    if not (folder / MODULES).is_file():
        raise NotFoundError(
            f"{folder}: expected a model that sentence-transformers saved ({MODULES}) or model2vec "
            f"({WEIGHTS} with `embeddings`); save it with its library, or name its ONNX file"
        )
    modules = {role: read_modules(folder, role) for role in TEXT_ROLES}
    role: TextRole = "query" if queries else "document"
    first = modules[role][0]
    if first.kind != STATIC and not first.path and modules["document"] == modules["query"]:
        for graph in (folder / "onnx" / _GRAPH, folder / _GRAPH):
            if graph.is_file():
                return OnnxModel(graph, queries=queries)
    files: RoleFiles = {one: _files(folder, modules[one], one) for one in TEXT_ROLES}
    if first.kind == STATIC:
        return StaticModel(files, queries=queries)
    roles = [one for one in TEXT_ROLES if modules[one][0] == first]
    return OnnxModel(_exported(folder, first, files, roles), queries=queries, files=files)


def _of_model2vec(folder: Path) -> bool:
    """Tell whether model2vec saved the folder; it writes modules.json, too."""
    needed = [folder / name for name in (WEIGHTS, "config.json", "tokenizer.json")]
    return all(file.is_file() for file in needed) and is_model2vec(needed[0])


def _open_model2vec(folder: Path, *, queries: bool) -> StaticModel:
    file = folder / "config.json"
    config = parse_model_file(file, Model2vecConfig)
    declared = Declaration(pooling="none", normalise=config.normalize)
    files = TextFiles((folder / WEIGHTS, file), declared, folder / "tokenizer.json")
    both: RoleFiles = {"document": files, "query": files}
    return StaticModel(both, queries=queries, model2vec=config)


def _files(folder: Path, modules: Sequence[SentenceModule], role: TextRole) -> TextFiles:
    """Return what determines the vectors of a role, without an ONNX file."""
    first = modules[0]
    place = folder / first.path
    if first.kind == STATIC:
        declared = read_static_declaration(folder, role)
        weights = [place / WEIGHTS]
    else:
        declared = read_declaration(folder / _GRAPH, _OUTPUTS, role)
        weights = [*sorted(place.glob("*.safetensors")), place / "config.json"]
    if not weights[0].is_file() or weights[0].suffix != ".safetensors":
        raise InvalidInputError(_no_weights(place))
    tokenizer = folder / declared.tokenizer
    if not tokenizer.is_file():
        raise NotFoundError(
            f"{tokenizer}: no such file; load the model with its library and save it again, which "
            "writes the tokenizer"
        )
    return TextFiles(tuple(weights), declared, tokenizer)


def _no_weights(folder: Path) -> str:
    pickles = [one.name for one in sorted(folder.iterdir()) if one.suffix in _PICKLES]
    found = f"{pickles[0]}, a pickle, which is never read" if pickles else "none"
    return (
        f"{folder}: expected the model's weights as {WEIGHTS}, found {found}; load the model with "
        "its library and save it again"
    )


def _exported(
    folder: Path, transformer: SentenceModule, files: RoleFiles, roles: Sequence[TextRole]
) -> Path:
    """Return the ONNX file of a folder's Transformer, exported once for each state of the folder.

    Args:
        folder: The model's folder.
        transformer: The module.
        files: The files of both roles.
        roles: The roles whose texts pass this module.
    """
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
            f"{error}; the export of {folder} is kept there, or in the folder that the environment "
            "variable XDG_CACHE_HOME names"
        ) from error
    with lock_file(target.with_name(f"{name}.lock"), _PATIENCE):
        if (target / _GRAPH).is_file():
            return target / _GRAPH
        remove_temporary_files(target.parent, name)
        work = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY_PREFIX}{name}-", dir=target.parent))
        try:
            _run_exporter(folder, work, roles)
            _compare(work, folder, files, roles)
            (work / _CHECK).unlink()
            if _digest(folder) != digest:
                raise InvalidInputError(
                    f"{folder}: changed while it was exported; run the command again"
                )
            publish_dir(work, target)
        finally:
            remove_temporary_files(target.parent, name)
    return target / _GRAPH


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
    """Export in a child process: torch stays out of this one, and its memory is freed."""
    done = subprocess.run(
        # -P: a folder in which the command is run lends no module.
        [sys.executable, "-P", "-m", _EXPORTER, str(folder.absolute()), str(out), *roles],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0 and (out / _GRAPH).is_file() and (out / _CHECK).is_file():
        return
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = lines[-1][:500] if lines else f"its process ended with {done.returncode}"
    if "trust_remote_code" in done.stderr:
        why = "it has code of its own, which is never run here"
    raise InvalidInputError(f"{folder}: cannot be exported to ONNX ({why}); {_BY_HAND}")


def _compare(out: Path, folder: Path, files: RoleFiles, roles: Sequence[TextRole]) -> None:
    """Compare vectors of the exported model with those of the library, for each role.

    Raises:
        InvalidInputError: They differ.
    """
    with np.load(out / _CHECK) as check:
        texts = [str(text) for text in check["texts"]]
        for role in roles:
            wanted = check[role]
            model = OnnxModel(out / _GRAPH, queries=role == "query", files=files)
            # Together, so that all but the longest are padded, and one by one.
            for made in (model.embed(texts), np.concatenate([model.embed([t]) for t in texts])):
                cosine = _least_cosine(made, wanted)
                if not cosine >= _LEAST_COSINE:
                    raise InvalidInputError(
                        f"{folder}: its exported ONNX file gives other vectors than "
                        f"sentence-transformers (cosine {cosine:.4f} for a {role}, expected at "
                        f"least {_LEAST_COSINE}); {_BY_HAND}"
                    )


def _least_cosine(some: np.ndarray, others: np.ndarray) -> float:
    """Return the least cosine of two rows; nan where shapes differ or a vector is zero."""
    if some.shape != others.shape:
        return float("nan")
    norms = np.linalg.norm(some, axis=1) * np.linalg.norm(others, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return float(((some * others).sum(1) / norms).min())
