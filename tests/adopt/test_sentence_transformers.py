"""Models that sentence-transformers saves: what it encodes is embedded, or refused by name."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from nobackfill.adopt.embedding import open_embedder
from nobackfill.errors import InvalidInputError
from nobackfill.release.text_models import open_text_encoder
from tests.adopt.library_models import DIM, GRAPH, LIBRARY, TEXTS, dense, lay_out, save
from tests.support import trials
from tests.support.blocks import manifest
from tests.training.life import run_export


def saved(
    folder: Path, modules: list[Any], outputs: Sequence[str] = ("token_embeddings",),
    **settings: Any,
) -> tuple[Any, Path]:  # fmt: skip
    """The library's model, and its ONNX file with these outputs."""
    made = save(folder, modules, **settings)
    model = onnx.load(GRAPH)
    by_name = {output.name: output for output in model.graph.output}
    del model.graph.output[:]
    model.graph.output.extend(by_name[name] for name in outputs)
    (folder / "onnx").mkdir()
    onnx.save(model, folder / "onnx" / "model.onnx")
    return made, folder / "onnx" / "model.onnx"


def alike(graph: Path, wanted: Any, *, queries: bool = False) -> None:
    found = open_embedder(str(graph), queries=queries).embed(TEXTS)
    np.testing.assert_allclose(found, wanted, atol=1e-5)


MEAN = Pooling(DIM, "mean")
APPLIED = {
    "mean": [MEAN, Normalize()],
    "mean of any norm": [MEAN],
    "cls": [Pooling(DIM, "cls"), Normalize()],
    "max": [Pooling(DIM, "max")],
    "last token": [Pooling(DIM, "lasttoken")],
    "weighted mean": [Pooling(DIM, "weightedmean")],
    "mean by the root": [Pooling(DIM, "mean_sqrt_len_tokens"), Normalize()],
    "two modes": [Pooling(DIM, ["mean", "cls"])],
    "all modes": [Pooling(DIM, ["lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"])],
    "dense": dense(),
    "layer norm": [MEAN, LayerNorm(DIM), Normalize()],
    "one after the other": [
        MEAN, Normalize(), Dense(DIM, 6, activation_function=torch.nn.ReLU()), LayerNorm(6),
        Dense(6, 3, bias=False, activation_function=torch.nn.Identity()),
    ],
    "a residual": [
        MEAN, Dense(DIM, DIM, use_residual=True), Dense(DIM, 5, use_residual=True),
        Dense(5, 5, activation_function=torch.nn.SiLU()),
        Dense(5, 5, activation_function=torch.nn.Sigmoid()),
    ],
}  # fmt: skip


@pytest.mark.parametrize("case", APPLIED)
def test_what_is_applied_is_what_the_library_encodes(case: str, tmp_path: Path) -> None:
    made, graph = saved(tmp_path / "m", APPLIED[case])
    alike(graph, made.encode(TEXTS))


REFUSED = {
    "2_Pooling": [MEAN, MEAN],
    "1_Dense": [Dense(DIM, DIM, module_input_name="token_embeddings"), MEAN],
    "activation torch.nn.modules.activation.Softplus": [
        MEAN, Dense(DIM, DIM, activation_function=torch.nn.Softplus()),
    ],
    "reads 'sentence_embedding' and writes 'other'": [
        MEAN, Dense(DIM, DIM, module_output_name="other"),
    ],
    "reads 'token_embeddings' and writes 'token_embeddings'": [MEAN, Normalize("token_embeddings")],
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_applied_is_refused_by_name(what: str, tmp_path: Path) -> None:
    _, graph = saved(tmp_path / "m", REFUSED[what])
    with pytest.raises(InvalidInputError, match=f"{what}.* 'sentence_embedding'"):
        open_embedder(str(graph))


@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_damaged_weights_of_a_module_are_named(damage: str, tmp_path: Path) -> None:
    _, graph = saved(tmp_path / "m", dense())
    file = tmp_path / "m" / "2_Dense" / "model.safetensors"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:60] if damage == "cut" else b"\2" + b"\0" * 7 + b"{}")
    with pytest.raises(
        InvalidInputError,
        match=r"2_Dense.model\.safetensors: .*(safetensors|tensors linear.weight of a Dense)",
    ):
        open_embedder(str(graph))


def test_weights_are_part_of_the_fingerprint(tmp_path: Path) -> None:
    torch.manual_seed(3)
    _, first = saved(tmp_path / "a", dense())
    _, same = saved(tmp_path / "b", dense())
    _, other = saved(tmp_path / "c", [MEAN, Dense(DIM, 5), Normalize()])
    prints = [open_embedder(str(graph)).fingerprint for graph in (first, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_release_refuses_a_router(tmp_path: Path) -> None:
    """Its graph for queries would be that for documents."""
    router = Router.for_query_document([MEAN], [Pooling(DIM, "cls")])
    saved(tmp_path / "m", [router])
    with trials.near():
        refused = run_export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "m")
    assert refused.exit_code == 65 and "Router takes queries another way" in refused.output


@pytest.mark.parametrize("first", [0, 1])
def test_a_graph_of_the_whole_model_is_taken_as_it_is(first: int, tmp_path: Path) -> None:
    outputs = ["token_embeddings", "sentence_embedding"]
    made, graph = saved(tmp_path / "m", dense(), outputs[first:] + outputs[:first])
    wanted = made.encode(TEXTS)
    alike(graph, wanted)
    # Where nothing is declared, too, and whatever pooling is.
    (tmp_path / "m" / "modules.json").unlink()
    for declared in ({}, {"pooling": "cls"}):
        (graph.with_suffix(".json")).write_text(json.dumps({"max_length": 24} | declared))
        alike(graph, wanted)


@pytest.mark.parametrize(
    "outputs", [["token_embeddings"], ["token_embeddings", "sentence_embedding"]]
)
def test_a_release_has_the_whole_model(outputs: list[str], tmp_path: Path) -> None:
    made, _ = saved(tmp_path / "m", dense(), outputs)
    with trials.near():
        done = run_export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "m")
    assert done.exit_code == 0, done.output
    model = open_text_encoder(tmp_path / "repo", manifest(tmp_path / "repo", 1))
    np.testing.assert_allclose(model.run(TEXTS, "document"), made.encode(TEXTS), atol=1e-5)


def test_prompts_stand_before_texts_of_their_role(tmp_path: Path) -> None:
    prompts = {"query": "w20 ", "document": "w21 w22 "}
    made, graph = saved(tmp_path / "m", [MEAN], prompts=prompts)
    alike(graph, made.encode_document(TEXTS))
    alike(graph, made.encode_query(TEXTS), queries=True)


def test_no_prompts_are_none(tmp_path: Path) -> None:
    made, graph = saved(tmp_path / "m", [MEAN])
    file = tmp_path / "m" / "config_sentence_transformers.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": None}))
    alike(graph, made.encode(TEXTS))


def test_a_default_prompt_has_to_be_declared(tmp_path: Path) -> None:
    """encode() puts it before texts, encode_document() does not: nobody knows which is meant."""
    made, graph = saved(
        tmp_path / "m", [MEAN], prompts={"topic": "w20 w21 "}, default_prompt_name="topic"
    )
    with pytest.raises(InvalidInputError, match="default_prompt_name topic") as refused:
        open_embedder(str(graph))
    said = str(refused.value)
    written = said[said.index("{") : said.index("}") + 1]
    graph.with_suffix(".json").write_text(written)
    alike(graph, made.encode(TEXTS))


def test_prompts_that_are_not_pooled_are_refused(tmp_path: Path) -> None:
    pooling = Pooling(DIM, "mean", include_prompt=False)
    made, graph = saved(tmp_path / "m", [pooling])
    alike(graph, made.encode(TEXTS))
    _, graph = saved(tmp_path / "n", [pooling], prompts={"document": "w21 "})
    with pytest.raises(InvalidInputError, match="include_prompt"):
        open_embedder(str(graph))


def test_capitals_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    made, graph = saved(tmp_path / "m", [MEAN], transformer={"do_lower_case": True})
    alike(graph, made.encode(TEXTS))


@pytest.mark.parametrize("says", ["tokenizer", "model", "neither"])
def test_texts_are_cut_where_the_library_cuts_them(says: str, tmp_path: Path) -> None:
    made, graph = saved(tmp_path / "m", [MEAN])
    (tmp_path / "m" / "sentence_bert_config.json").unlink()
    config = tmp_path / "m" / "tokenizer_config.json"
    said = json.loads(config.read_text())
    if says != "tokenizer":
        del said["model_max_length"]
        config.write_text(json.dumps(said))
    if says == "neither":
        file = tmp_path / "m" / "config.json"
        model = json.loads(file.read_text())
        del model["max_position_embeddings"]
        file.write_text(json.dumps(model))
        with pytest.raises(InvalidInputError, match="after how many tokens"):
            open_embedder(str(graph))
        return
    made = type(made)(str(tmp_path / "m"), device="cpu")
    alike(graph, made.encode(TEXTS))


@pytest.mark.parametrize(
    ("file", "key", "value", "words"),
    [
        ("tokenizer_config.json", "truncation_side", "left", "truncation_side left"),
        ("sentence_bert_config.json", "document_length", 5, "document_length"),
        ("sentence_bert_config.json", "processing_kwargs", {"text": {"padding": 1}}, "processing_"),
        ("sentence_bert_config.json", "transformer_task", "fill-mask", "transformer_task fill"),
        (
            "1_Pooling/config.json",
            "pooling_mode",
            7,
            r"1_Pooling.config\.json: .*\(pooling_mode.str: Input",
        ),
        ("config_sentence_transformers.json", "prompts", 7, "transformers.json: .*prompts: Input"),
    ],
)
def test_settings_that_nothing_here_follows_are_refused(
    file: str, key: str, value: object, words: str, tmp_path: Path
) -> None:
    _, graph = saved(tmp_path / "m", [MEAN])
    place = tmp_path / "m" / file
    place.write_text(json.dumps(json.loads(place.read_text()) | {key: value}))
    with pytest.raises(InvalidInputError, match=words):
        open_embedder(str(graph))


OLD = json.loads((LIBRARY / "old.json").read_text())


@pytest.mark.parametrize("case", OLD)
def test_the_layout_of_before_5_4(case: str, tmp_path: Path) -> None:
    """Folders of `python -m tests.adopt.library_models`, and what the library encodes by them."""
    graph = lay_out(tmp_path / "m", OLD[case]["files"])
    model = onnx.load(graph)
    del model.graph.output[1]
    onnx.save(model, graph)
    if OLD[case]["refused"] is None:
        library = SentenceTransformer(str(tmp_path / "m"), device="cpu")
        alike(graph, OLD[case].get("encoded") or library.encode(TEXTS))
    else:
        with pytest.raises(InvalidInputError, match=OLD[case]["refused"]):
            open_embedder(str(graph))
