"""Embedding items by ONNX files and Python functions; a later run goes on with the folder."""

import json
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto
from PIL import Image
from safetensors.numpy import save_file

from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.digests import sha256_bytes
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, NotFoundError
from nobackfill.release.publishing.sentence_head import Layer, PoolingMode, pool_tokens
from tests.adopt.made import world, write_parquet
from tests.adopt.models import expected, fix_inputs, image_model, text_model, texts


def write_lines(path: Path, values: list[str]) -> Path:
    lines = [json.dumps({"id": f"t{n}", "text": text}) for n, text in enumerate(values)]
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_texts_are_pooled_as_declared_whatever_their_neighbours_in_a_batch(
    tmp_path: Path, pooling: str
) -> None:
    model = OnnxModel(text_model(tmp_path / "m", 0, pooling=pooling, prefix="query: "))
    some = ["w1", "w2 w3 w4 w5", "w6 unknown"]
    for text, vector in zip(some, model.embed(some), strict=True):
        wanted = expected(tmp_path / "m", f"query: {text}", pooling)
        np.testing.assert_allclose(vector, wanted, atol=1e-6)


def test_a_long_text_is_cut_where_it_is_declared(tmp_path: Path) -> None:
    model = OnnxModel(text_model(tmp_path / "m", 0, max_length=2, normalise=False))
    (vector,) = model.embed(["w1 w2 w3 w4"])
    np.testing.assert_allclose(vector, expected(tmp_path / "m", "w1 w2", unit=False), atol=1e-6)


@pytest.mark.parametrize("batch", [None, 1, 2])
@pytest.mark.parametrize("tokens", [None, 4])
@pytest.mark.parametrize("type", [TensorProto.INT32, TensorProto.INT64])
def test_inputs_of_fixed_sizes_and_of_32_bits(
    batch: int | None, tokens: int | None, type: int, tmp_path: Path
) -> None:
    path = text_model(tmp_path / "m", 0)
    fix_inputs(path, batch=batch, tokens=tokens, type=type)
    some = ["w1", "w2 w3 w4", "w6 w7 w8 w9 w10 w11"]
    cut = some if tokens is None else [" ".join(one.split()[:tokens]) for one in some]
    vectors = OnnxModel(path).embed(some)
    for text, vector in zip(cut, vectors, strict=True):
        np.testing.assert_allclose(vector, expected(tmp_path / "m", text), atol=1e-6)


@pytest.mark.parametrize(
    "mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
)
def test_pooling_is_what_a_loop_over_the_tokens_gives(mode: PoolingMode) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.normal(size=(5, 6, 3)).astype(np.float32)
    lengths = [1, 2, 6, 4, 5]
    mask = np.array([[1] * length + [0] * (6 - length) for length in lengths])
    joined = pool_tokens(tokens, mask, [mode, "cls"])
    for row, length in enumerate(lengths):
        known = tokens[row, :length].astype(np.float64)
        numbers = np.arange(1, length + 1)
        right = {
            "cls": known[0],
            "max": known.max(0),
            "mean": known.mean(0),
            "mean_sqrt_len_tokens": known.sum(0) / np.sqrt(length),
            "weightedmean": sum(n * one for n, one in zip(numbers, known, strict=True))
            / numbers.sum(),
            "lasttoken": known[-1],
        }[mode]
        np.testing.assert_allclose(joined[row], [*right, *known[0]], rtol=1e-5, atol=1e-6)


def test_a_layer_whose_weights_are_gone_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    with pytest.raises(InvalidInputError, match=r"model\.safetensors: cannot read this file"):
        Layer(kind="LayerNorm", folder=tmp_path).open()
    save_file({"norm.weight": np.ones(3, np.float32)}, file)
    layer = Layer(kind="LayerNorm", sha256=sha256_bytes(file.read_bytes()), folder=tmp_path)
    with pytest.raises(
        InvalidInputError, match=r"norm\.bias of a LayerNorm.* found none named norm"
    ):
        layer.open()


def test_an_export_of_sentence_transformers_needs_no_declaration(tmp_path: Path) -> None:
    made = text_model(tmp_path / "m", 0)
    folder = tmp_path / "export"
    (folder / "onnx").mkdir(parents=True)
    made.rename(folder / "onnx" / "model.onnx")
    (tmp_path / "m" / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "1_Pooling").mkdir()
    pooling = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 3}')
    types = ["Transformer", "Pooling"]
    modules = [
        {"path": f"{n}_{name}" if n else "", "type": f"sentence_transformers.models.{name}"}
        for n, name in enumerate(types)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (vector,) = OnnxModel(folder / "onnx" / "model.onnx").embed(["w5 w2"])
    np.testing.assert_allclose(vector, expected(tmp_path / "m", "w5", unit=False), atol=1e-6)


@pytest.mark.parametrize("size", [4, "side"])
def test_images_are_scaled_as_declared(tmp_path: Path, size: int | str) -> None:
    path = image_model(tmp_path / "model.onnx", size)
    declared = {"mean": [0.5, 0, 0], "std": [0.5, 1, 1], "normalise": False, "size": 4}
    (tmp_path / "model.json").write_text(json.dumps(declared))
    folder = tmp_path / "images" / "below"
    folder.mkdir(parents=True)
    Image.new("RGB", (9, 7), (255, 51, 0)).save(folder / "one.png")
    items = read_items(str(tmp_path / "images"), column="text")
    assert (items.kind, items.ids) == ("image", ["below/one.png"])
    (vector,) = OnnxModel(path).embed(items.contents)
    np.testing.assert_allclose(vector, [1, 0.2, 0], atol=1e-6)


def test_a_run_goes_on_and_another_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nobackfill.adopt.embedding.vector_folder.PART_ITEMS", 20)
    items = read_items(str(write_lines(tmp_path / "t.jsonl", texts(50))), column="text")
    model = open_embedder(str(text_model(tmp_path / "m", 0)))
    calls = 0

    def die(done: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_into(tmp_path / "out", items, model, batch_size=10, progress=die)
    # Finished items are kept, though their file was to hold more.
    assert embed_into(tmp_path / "out", items, model, batch_size=10) == 10
    assert embed_into(tmp_path / "out", items, model) == 0
    rows = read_all(open_source(str(tmp_path / "out")))
    assert sorted(rows.ids) == sorted(items.ids)
    np.testing.assert_allclose(
        rows.vectors[rows.ids.index("t7")], model.embed(items.contents)[7], atol=1e-6
    )
    for other in (text_model(tmp_path / "n", 1), text_model(tmp_path / "m", 0, pooling="cls")):
        with pytest.raises(IncompatibleSpaceError, match="name another folder with --out"):
            embed_into(tmp_path / "out", items, open_embedder(str(other)))
    assert len(read_all(open_source(str(tmp_path / "out")))) == 50


def test_texts_of_a_source_are_embedded_those_that_are_wanted(tmp_path: Path) -> None:
    made = world(120)
    path = write_parquet(tmp_path / "s.parquet", made.ids, made.old)
    items = read_items(str(path), column="text", only={"item-3", "item-99", "gone"})
    assert items.ids == ["item-3", "item-99"]
    assert items.contents == ["on item-3", "on item-99"]
    with pytest.raises(InvalidInputError, match="expected a column 'body'"):
        read_items(str(path), column="body")
    with pytest.raises(NotFoundError, match="expected items to embed, found none with the ids"):
        read_items(str(path), column="text", only={"gone"})


def test_a_function_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_model.py").write_text(
        "import numpy as np\n"
        "def lengths(items): return np.array([[len(item), 1] for item in items], float)\n"
        "def fewer(items): return [[1.0, 2.0]]\n"
        "def ragged(items): return [[1.0] * (n + 1) for n, _ in enumerate(items)]\n"
        "def more(items): return [[1.0], *ragged(items)]\n"
        "number = 3\n"
    )
    model = open_embedder("own_model:lengths")
    assert model.embed(["ab", "c"]).tolist() == [[2, 1], [1, 1]]
    with pytest.raises(InvalidInputError, match="return 2 vectors, one for each item, got 1"):
        open_embedder("own_model:fewer").embed(["a", "b"])
    with pytest.raises(InvalidInputError, match="one dimension in all rows"):
        open_embedder("own_model:ragged").embed(["a", "b"])
    with pytest.raises(InvalidInputError, match="return 2 vectors, one for each item, got 3"):
        open_embedder("own_model:more").embed(["a", "b"])
    for name in ("own_model:none", "no_such_module:f"):
        with pytest.raises(NotFoundError, match="cannot be imported"):
            open_embedder(name)
    with pytest.raises(InvalidInputError, match="expected a function"):
        open_embedder("own_model:number")


def test_what_cannot_be_embedded_gets_a_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(InvalidInputError, match="cannot be read as an ONNX model"):
        open_embedder(str(broken))
    with pytest.raises(NotFoundError, match="no such file"):
        open_embedder(str(tmp_path / "none.onnx"))
    with pytest.raises(InvalidInputError, match="expected a model as FILE"):
        open_embedder("gpt")
    model = text_model(tmp_path / "m", 0, poling="mean")
    with pytest.raises(InvalidInputError, match="poling"):
        open_embedder(str(model))
    (tmp_path / "m" / "model.json").unlink()
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError, match=r"tokenizer\.json next to"):
        open_embedder(str(model))
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"id": 1, "text": "a"}\n{"id": 1}\n')
    with pytest.raises(InvalidInputError, match=r"bad\.jsonl:2"):
        read_items(str(lines), column="text")
    lines.write_text('{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n')
    with pytest.raises(InvalidInputError, match="each id once, found '1' at several items"):
        read_items(str(lines), column="text")
    images = image_model(tmp_path / "image.onnx")
    items = read_items(str(write_lines(tmp_path / "t.jsonl", ["a"])), column="text")
    with pytest.raises(InvalidInputError, match="reads images, but the items are texts"):
        embed_into(tmp_path / "out", items, open_embedder(str(images)))


def test_an_item_that_has_changed_is_embedded_again(tmp_path: Path) -> None:
    text_model(tmp_path / "m", 0)
    embedder = open_embedder(str(tmp_path / "m" / "model.onnx"))
    lines = ["w1", "w2", "w3", "w4"]

    def vectors() -> dict[str, np.ndarray]:
        rows = read_all(open_source(str(tmp_path / "out")))
        return dict(zip(rows.ids, rows.vectors, strict=True))

    file = write_lines(tmp_path / "items.jsonl", lines)
    assert embed_into(tmp_path / "out", read_items(str(file), column="text"), embedder) == 4
    file = write_lines(tmp_path / "items.jsonl", ["w1", "w9", "w3", "w4"])
    assert embed_into(tmp_path / "out", read_items(str(file), column="text"), embedder) == 1
    found = vectors()
    assert set(found) == {"t0", "t1", "t2", "t3"}
    for name, text in (("t0", "w1"), ("t1", "w9"), ("t3", "w4")):
        np.testing.assert_allclose(found[name], expected(tmp_path / "m", text), atol=1e-6)
    assert open_source(str(tmp_path / "out")).facts().model == embedder.fingerprint
