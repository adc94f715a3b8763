"""Text models of others become releases; what cannot be one is refused with a sentence."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from PIL import Image

from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.class_folders import list_images
from nobackfill.errors import NoEncoderError, VerificationError
from nobackfill.quality import embedded
from nobackfill.quality.gate import measure_release
from nobackfill.quality.listing import list_texts
from nobackfill.release.manifest import Manifest, text_encoder_path, tokenizer_path
from nobackfill.release.models import ImageEmbedder, open_embedder
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.release.text_models import open_text_encoder
from nobackfill.release.trust.trust import Publication
from tests.adopt.models import WORDS, expected, image_model, text_model, texts
from tests.support import trials
from tests.support.blocks import manifest
from tests.training.life import run_export


@pytest.fixture(autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


def export(repo: Path, release: int, *arguments: str | Path) -> Manifest:
    result = run_export(repo, release, *arguments)
    assert result.exit_code == 0, result.output
    return manifest(repo, release)


@pytest.mark.parametrize(
    "declared",
    [
        {},
        {"pooling": "cls"},
        {"normalise": False, "output": "last_hidden_state"},
        {"max_length": 3},
    ],
)
def test_a_published_text_model_gives_what_it_gave(
    declared: dict[str, Any], tmp_path: Path
) -> None:
    source = text_model(tmp_path / "model", 1, **declared)
    made = export(tmp_path / "repo", 1, "--text-encoder", source.parent)
    # Pooled by other code, of the file as it was.
    many = [*texts(9), "w1", "w1 w2 strange words " * 99]
    published = open_text_encoder(tmp_path / "repo", made)
    given = OnnxModel(source).embed(many)
    np.testing.assert_allclose(published.run(many, "document"), given, atol=1e-5)
    assert (made.format, made.embedder.unit) == (2, declared.get("normalise", True))
    with pytest.raises(NoEncoderError, match="embeds no images"):
        open_embedder(tmp_path / "repo", made)


def test_queries_and_documents_have_prefixes_of_their_own(tmp_path: Path) -> None:
    text_model(tmp_path / "model", 1, prefix="w9 ", query_prefix="query: ")
    made = export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "model" / "model.onnx")
    model = open_text_encoder(tmp_path / "repo", made)
    for role, text in (("query", "query: w1"), ("document", "w9 w1")):
        vector = model.run(["w1"], role)[0]  # type: ignore[arg-type]
        np.testing.assert_allclose(vector, expected(tmp_path / "model", text), atol=1e-6)


def broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Magic"}}')


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def ids_outside_the_vocabulary(folder: Path) -> None:
    said = json.loads((folder / "tokenizer.json").read_text())
    said["model"]["vocab"]["rare"] = len(WORDS) + 7
    (folder / "tokenizer.json").write_text(json.dumps(said))


def fixed_batch(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(model, folder / "model.onnx")


def vendor_operators(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(model, folder / "model.onnx")


def no_onnx(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"no model")


def no_model(folder: Path) -> None:
    (folder / "model.onnx").unlink()


def no_output(folder: Path) -> None:
    model = onnx.load(folder / "model.onnx")
    del model.graph.output[:]
    onnx.save(model, folder / "model.onnx")


def wrong_output(folder: Path) -> None:
    (folder / "model.json").write_text('{"output": "pooled"}')


def no_pooling(folder: Path) -> None:
    (folder / "model.json").write_text('{"pooling": "none"}')


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (broken_tokenizer, "cannot load the tokenizer"),
        (no_tokenizer, "put its tokenizer.json next to"),
        (ids_outside_the_vocabulary, "tokens that its model does not accept"),
        (fixed_batch, "with a free number of texts n"),
        (vendor_operators, "only ONNX's own operators"),
        (no_onnx, "cannot be read as an ONNX model"),
        (no_model, "expected an ONNX file, or a folder"),
        (no_output, "expected a text model with an output, got none"),
        (wrong_output, "names the output 'pooled'"),
        (no_pooling, "with a pooling such as mean or cls"),
    ],
)
def test_what_is_no_text_model_is_refused(spoil: object, sentence: str, tmp_path: Path) -> None:
    text_model(tmp_path / "model", 1)
    spoil(tmp_path / "model")  # type: ignore[operator]
    result = run_export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "model")
    assert result.exit_code in (65, 66)
    assert sentence in result.output
    assert not (tmp_path / "repo" / "release-1.json").exists()


def test_a_manifest_that_names_an_encoder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    text_model(tmp_path / "model", 1)
    export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "model")
    for path in (tokenizer_path(1), text_encoder_path(1)):
        data = (tmp_path / "repo" / path).read_bytes()
        (tmp_path / "repo" / path).unlink()
        with pytest.raises(VerificationError, match="text_encoder_1"):
            verify_publication(tmp_path / "repo")
        (tmp_path / "repo" / path).write_bytes(data)
    assert verify_publication(tmp_path / "repo").releases == (1,)


def test_the_model_of_some_vectors_may_be_gone(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    first = export(repo, 1, "--vectors-of", "example/ada:12")
    assert (first.embedder.dim, first.embedder.vectors_of) == (12, "example/ada")
    assert verify_publication(repo).releases == (1,)
    for wrong in ("example/ada", ":12", "ada:0"):
        assert "expected NAME:DIM" in run_export(repo, 2, "--vectors-of", wrong, "--force").output
    both = run_export(repo, 2, "--vectors-of", "ada:12", "--text-encoder", tmp_path, "--force")
    assert both.exit_code == 78


def labelled(file: Path, count: int = 60) -> Path:
    """Texts of six classes: one word of five tells the class."""
    rng = np.random.default_rng(0)
    lines = []
    for number in range(count):
        others = " ".join(f"w{n}" for n in rng.choice(np.arange(6, 40), 4, replace=False))
        lines.append({"id": number, "text": f"w{number % 6} {others}", "label": f"c{number % 6}"})
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def weighed(folder: Path, seed: int, strength: float) -> Path:
    """A model that tells w0 to w5 from one another the better, the larger `strength` is."""
    table = np.random.default_rng(seed).normal(size=(len(WORDS), 16)).astype(np.float32)
    first = WORDS.index("w0")
    table[first : first + 6] = strength * np.eye(6, 16)
    return text_model(folder, seed, table=table).parent


def test_the_gate_measures_texts(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", labelled(tmp_path / "texts.jsonl")
    first = export(repo, 1, "--text-encoder", weighed(tmp_path / "1", 1, 1.0), "--eval-texts", file)
    assert first.gate.verdict == "first"
    (alone,) = first.evidence
    assert (alone.name, alone.queries) == ("1/1", 30)
    assert {one.origin for one in first.calibration} == {"native", "re-embedded"}
    # Nothing carries the older texts on.
    refused = run_export(
        repo, 2, "--text-encoder", weighed(tmp_path / "2", 2, 9.0), "--eval-texts", file
    )
    assert refused.exit_code == 65
    assert "no upgrade and no direct search serves" in refused.output
    blind = run_export(repo, 2, "--vectors-of", "gone:16", "--eval-texts", file)
    assert "release 2 has no model that embeds them" in blind.output


def test_the_gate_embeds_images_once_for_images_and_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = tmp_path / "repo"
    image = image_model(tmp_path / "image.onnx", weight=np.eye(3))
    table = np.random.default_rng(0).normal(size=(len(WORDS), 3)).astype(np.float32)
    text = text_model(tmp_path / "model", 1, table=table)
    made = export(repo, 1, "--onnx", image, "--text-encoder", text.parent)
    rng = np.random.default_rng(1)
    for number, place in np.ndindex(6, 10):
        colour = np.eye(6, 3)[number] * 150 + 50 + rng.integers(0, 50, 3)
        pixels = np.broadcast_to(colour, (4, 4, 3)).astype(np.uint8)
        file = tmp_path / "images" / f"c{number}" / f"{place}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file)
    opened = []

    def counted(*arguments: Any) -> ImageEmbedder:
        opened.append(arguments)
        return open_embedder(*arguments)

    monkeypatch.setattr(embedded, "open_embedder", counted)
    _, evidence = measure_release(
        made, Publication({}, frozenset()), repo, list_images(tmp_path / "images"),
        seed=0, int8_loss=1.0, texts=list_texts(labelled(tmp_path / "texts.jsonl")),
    )  # fmt: skip
    assert [cell.name for cell in evidence.cells] == ["1/1"]
    (by_text,) = evidence.text_query_cells
    assert (by_text.name, by_text.queries, by_text.items) == ("1/1", 60, evidence.cells[0].items)
    assert len(opened) == 2, "once for the gate's half, once for the calibration's"


def test_queries_may_have_a_model_of_their_own(tmp_path: Path) -> None:
    repo, both = tmp_path / "repo", ("--text-encoder", tmp_path / "documents")
    text_model(tmp_path / "documents", 1, prefix="w9 ")
    text_model(tmp_path / "queries", 2, query_prefix="query: ")
    one = export(repo, 1, *both)
    made = export(repo, 2, *both, "--query-encoder", tmp_path / "queries", "--force")
    assert (one.format, made.format) == (2, 3)
    assert one.space != made.space
    model = open_text_encoder(repo, made)
    for role, folder, text in (
        ("query", "queries", "query: w1"),
        ("document", "documents", "w9 w1"),
    ):
        vector = model.run(["w1"], role)[0]  # type: ignore[arg-type]
        np.testing.assert_allclose(vector, expected(tmp_path / folder, text), atol=1e-6)
    assert verify_publication(repo).releases == (1, 2)
    (repo / "query_encoder_2" / "1" / "model.onnx").unlink()
    with pytest.raises(VerificationError, match="query_encoder_2"):
        verify_publication(repo)


def other_words(folder: Path) -> None:
    said = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(said.replace('"w7"', '"seven"'))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (other_words, "expected the same tokenizer as --text-encoder"),
        (lambda folder: text_model(folder, 2, 9), "got dimension 9 and norm 1"),
        (lambda folder: text_model(folder, 2, max_length=3), "expected the same max_length as"),
        (no_model, "--query-encoder"),
    ],
)
def test_what_cannot_ask_for_documents_is_refused(
    spoil: object, sentence: str, tmp_path: Path
) -> None:
    for name in ("documents", "queries"):
        text_model(tmp_path / name, 1)
    spoil(tmp_path / "queries")  # type: ignore[operator]
    queries = ("--query-encoder", tmp_path / "queries")
    result = run_export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "documents", *queries)
    assert result.exit_code in (65, 66)
    assert sentence in result.output
    alone = run_export(tmp_path / "repo", 1, "--vectors-of", "gone:8", *queries)
    assert "also give --text-encoder FOLDER" in alone.output
