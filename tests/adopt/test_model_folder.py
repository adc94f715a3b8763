"""Folders that sentence-transformers and model2vec saved: embedded as these libraries encode."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from nobackfill.adopt.converters import read_card
from nobackfill.adopt.embedding import Embedder, open_embedder
from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import (
    CannotWriteError,
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
)
from tests.adopt.library_models import DIM, LIBRARY, TEXTS, WORDS, save, save_modules, static
from tests.adopt.model2vec_models import MODEL2VEC


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where exported ONNX files lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "nobackfill" / "onnx"


def alike(folder: Path, library: Any, texts: list[str] = TEXTS) -> None:
    """As documents and as queries, together and one by one."""
    for queries, encode in ((False, library.encode_document), (True, library.encode_query)):
        model = open_embedder(str(folder), queries=queries)
        wanted = encode(texts)
        found = model.embed(texts)
        np.testing.assert_allclose(found, wanted, atol=1e-4)
        norms = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
        assert ((found * wanted).sum(1)[norms > 0] / norms[norms > 0] >= 0.9999).all()
        np.testing.assert_allclose(
            np.concatenate([model.embed([t]) for t in texts]), wanted, atol=1e-4
        )


def opened(folder: Path) -> tuple[Embedder, Embedder]:
    return open_embedder(str(folder)), open_embedder(str(folder), queries=True)


# Static embeddings


STATIC = {
    "alone": [],
    "of norm 1": [Normalize()],
    "dense": [Dense(6, 4), LayerNorm(4), Normalize()],
}


@pytest.mark.parametrize("case", STATIC)
def test_static_embeddings_need_no_onnx_file(case: str, tmp_path: Path, cache: Path) -> None:
    prompts = {"query": "w20 ", "document": "w21 w22 "}
    library = save_modules(tmp_path / "m", [static(), *STATIC[case]], prompts=prompts)
    alike(tmp_path / "m", library, [*TEXTS, "unheard words", ""])
    assert not cache.exists()
    items, queries = opened(tmp_path / "m")
    assert items.fingerprint == queries.fingerprint
    assert (items.text_role, queries.text_role) == ("documents", "queries")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_tables_of_other_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    module = static()
    library = save_modules(tmp_path / "a", [module])
    save_modules(tmp_path / "b", [module.to(dtype)])
    found = open_embedder(str(tmp_path / "b")).embed(TEXTS)
    np.testing.assert_allclose(found, library.encode(TEXTS), atol=2e-2)


def test_a_text_without_tokens_has_the_librarys_zeros(tmp_path: Path) -> None:
    library = save_modules(tmp_path / "m", [static(), Normalize()])
    assert not library.encode([""]).any()
    assert not open_embedder(str(tmp_path / "m")).embed([""]).any()


def test_static_embeddings_truncate_as_their_tokenizer_does(tmp_path: Path) -> None:
    module = static()
    module.tokenizer.enable_truncation(3)
    alike(tmp_path / "m", save_modules(tmp_path / "m", [module]))


def test_another_table_is_another_model(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        save_modules(tmp_path / name, [static(seed=seed)])
    prints = [open_embedder(str(tmp_path / name)).fingerprint for name in "abc"]
    assert prints[0] == prints[1] != prints[2]


def test_a_table_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    save_modules(tmp_path / "m", [static()])
    file = tmp_path / "m" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["vocab"]["more"] = 900
    file.write_text(json.dumps(tokenizer))
    with pytest.raises(InvalidInputError, match=r"largest id is 900, got 35 rows"):
        open_embedder(str(tmp_path / "m"))


@pytest.mark.parametrize("header", ["5", "null", "[1]"])
def test_weights_whose_header_is_no_object_are_refused(header: str, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    length = len(header).to_bytes(8, "little")
    (tmp_path / "model.safetensors").write_bytes(length + header.encode())
    with pytest.raises(InvalidInputError, match="expected weights in the format safetensors"):
        open_embedder(str(tmp_path))


def test_a_default_prompt_of_static_embeddings_has_to_be_named(tmp_path: Path) -> None:
    prompts = {"topic": "w20 w21 "}
    save_modules(tmp_path / "m", [static()], prompts=prompts, default_prompt_name="topic")
    with pytest.raises(InvalidInputError, match='name that prompt "document" there'):
        open_embedder(str(tmp_path / "m"))


@pytest.mark.parametrize("case", sorted(path.name for path in MODEL2VEC.iterdir()))
def test_model2vec_is_read_as_model2vec_reads_it(case: str, tmp_path: Path) -> None:
    """Folders that `python -m tests.adopt.model2vec_models` made with model2vec."""
    shutil.copytree(MODEL2VEC / case, tmp_path / "m")
    encoded = json.loads((tmp_path / "m" / "encoded.json").read_text())
    for modules in (True, False):
        found = open_embedder(str(tmp_path / "m")).embed(encoded["texts"])
        np.testing.assert_allclose(found, encoded["vectors"], atol=2e-3 if "half" in case else 1e-6)
        if modules:
            # Versions before 0.4 write none.
            (tmp_path / "m" / "modules.json").unlink()


def test_no_torch_is_loaded_for_static_embeddings(tmp_path: Path) -> None:
    save_modules(tmp_path / "m", [static()])
    script = (
        "import sys\nfrom nobackfill.adopt.embedding import open_embedder\n"
        f"open_embedder({str(tmp_path / 'm')!r}).embed(['w1'])\n"
        "print({'torch', 'transformers', 'sentence_transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stderr


def test_a_card_names_a_folder_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "cards" / "m").mkdir(parents=True)
    sides = [{"name": "a", "licence": "MIT", "model": name} for name in ("m", "module:function")]
    card = {"old": sides[0], "new": sides[1], "corpus": "texts", "corpus_licence": "CC0-1.0"}
    file = tmp_path / "cards" / "card.json"
    file.write_text(json.dumps(card))
    read = read_card(file)
    assert (read.old.model, read.new.model) == (str(file.with_name("m")), "module:function")


# Routers


def test_each_role_takes_its_route(tmp_path: Path) -> None:
    router = Router.for_query_document([static(seed=1)], [static(seed=2), Dense(6, 6)])
    alike(tmp_path / "m", save_modules(tmp_path / "m", [router, Normalize()]))
    items, queries = opened(tmp_path / "m")
    assert items.fingerprint == queries.fingerprint
    assert items.text_role == "documents"
    assert queries.text_role.startswith("queries by ")
    assert items.fingerprint not in queries.text_role


def test_a_query_route_of_other_weights_is_another_encoder(tmp_path: Path) -> None:
    reads = []
    for name, query in (("a", 1), ("b", 3)):
        router = Router.for_query_document([static(seed=query)], [static(seed=2)])
        save_modules(tmp_path / name, [router])
        items, queries = opened(tmp_path / name)
        reads.append((items.fingerprint, queries.text_role))
    assert reads[0][0] == reads[1][0] and reads[0][1] != reads[1][1]


def test_vectors_of_both_routes_are_of_one_space(tmp_path: Path) -> None:
    router = Router.for_query_document([static(seed=1)], [static(seed=2)])
    save_modules(tmp_path / "m", [router])
    lines = [json.dumps({"id": f"t{n}", "text": text}) for n, text in enumerate(TEXTS)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    items = read_items(str(tmp_path / "t.jsonl"), column="text")
    for name, embedder in zip(("items", "queries"), opened(tmp_path / "m"), strict=True):
        embed_into(tmp_path / name, items, embedder)
    prints = [
        open_source(str(tmp_path / "items")).facts().model,
        opened(tmp_path / "m")[1].fingerprint,
    ]
    assert prints[0] == prints[1]


@pytest.mark.parametrize(
    "mappings",
    [
        {("query", None): "b", ("document", "text"): "a"},
        {(None, "text"): "b"},
        {("query", "text"): "b", (None, None): "a"},
        {("query", "image"): "a", ("document", None): "b", (None, None): "b"},
    ],
)
def test_routes_are_mapped_as_the_library_maps_them(mappings: Any, tmp_path: Path) -> None:
    router = Router({"a": [static(seed=1)], "b": [static(seed=2)]}, route_mappings=mappings)
    alike(tmp_path / "m", save_modules(tmp_path / "m", [router]))


def test_a_route_by_the_name_of_the_modality(tmp_path: Path) -> None:
    router = Router({"text": [static(seed=1)]})
    library = save_modules(tmp_path / "m", [router])
    alike(tmp_path / "m", library)
    items, queries = opened(tmp_path / "m")
    assert items.text_role == queries.text_role == ""


def test_a_missing_route_is_refused_with_what_adds_it(tmp_path: Path) -> None:
    library = save_modules(
        tmp_path / "m", [Router({"query": [static(seed=1)], "doc": [static(seed=2)]})]
    )
    with pytest.raises(ValueError, match="No route"):
        library.encode_document(TEXTS)
    with pytest.raises(InvalidInputError, match="routes doc, query, and none") as refused:
        open_embedder(str(tmp_path / "m"))
    said = str(refused.value)
    file = next((tmp_path / "m").rglob("router_config.json"))
    config = json.loads(file.read_text())
    config["parameters"] |= json.loads("{" + said[said.index('"route_mappings"') :] + "}")
    file.write_text(json.dumps(config))
    alike(tmp_path / "m", SentenceTransformer(str(tmp_path / "m"), device="cpu"))


def test_the_router_of_before_version_5(tmp_path: Path) -> None:
    """Asym: its own file is config.json, and it knows no mappings."""
    router = Router.for_query_document([static(seed=1)], [static(seed=2)])
    save_modules(tmp_path / "m", [router])
    file = next((tmp_path / "m").rglob("router_config.json"))
    config = json.loads(file.read_text())
    file.unlink()
    config["parameters"] = {"allow_empty_key": True}
    kinds = {
        name: f"sentence_transformers.models.{kind.rpartition('.')[2]}"
        for name, kind in config["types"].items()
    }
    (file.parent / "config.json").write_text(json.dumps(config | {"types": kinds}))
    modules = json.loads((tmp_path / "m" / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.models.Asym"
    (tmp_path / "m" / "modules.json").write_text(json.dumps(modules))
    alike(tmp_path / "m", SentenceTransformer(str(tmp_path / "m"), device="cpu"))


def test_a_module_with_code_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    router = Router.for_query_document([static(seed=1)], [static(seed=2)])
    save_modules(tmp_path / "m", [router])
    file = next((tmp_path / "m").rglob("router_config.json"))
    file.write_text(file.read_text().replace("sentence_transformers.", "modeling_own.", 1))
    with pytest.raises(InvalidInputError, match=r"modeling_own.* is never run"):
        open_embedder(str(tmp_path / "m"))
    save_modules(tmp_path / "n", [static()])
    file = tmp_path / "n" / "modules.json"
    file.write_text(file.read_text().replace("sentence_transformers.", "modeling_own.", 1))
    with pytest.raises(InvalidInputError, match=r"does not apply .*modeling_own"):
        open_embedder(str(tmp_path / "n"))


def test_modules_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    save_modules(tmp_path / "m", [static()])
    file = tmp_path / "m" / "modules.json"
    file.write_text(json.dumps([json.loads(file.read_text())[0] | {"path": "../n"}]))
    with pytest.raises(InvalidInputError, match=r"own folder, got '\.\./n'"):
        open_embedder(str(tmp_path / "m"))


# Transformers without an ONNX file


def bert(folder: Path, modules: list[Any], **settings: Any) -> Any:
    return save(folder, modules, **settings)


def graphs(cache: Path) -> list[Path]:
    return sorted(cache.glob("*/model.onnx"))


@pytest.mark.long
def test_a_transformer_is_exported_once(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dense, prompts and lower case are applied as for an ONNX file."""
    modules = [Pooling(DIM, ["mean", "cls"]), Dense(2 * DIM, 5), Normalize()]
    settings = {"prompts": {"query": "w20 "}, "transformer": {"do_lower_case": True}}
    library = bert(tmp_path / "m", modules, **settings)
    capsys.readouterr()
    alike(tmp_path / "m", library)
    cost = "to ONNX once, with torch; takes about 30 s of a processor and 1.0 GiB of memory\n"
    shown = capsys.readouterr().err
    assert shown == f"{tmp_path / 'm'}: exports its model (0 MiB) {cost}"
    (graph,) = graphs(cache)
    before = graph.stat().st_mtime_ns
    assert {path.stat().st_mode & 0o777 for path in graph.parent.iterdir()} == {0o600}
    assert graph.parent.parent.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in graph.parent.iterdir()] == ["model.onnx"]
    items, queries = opened(tmp_path / "m")
    assert (items.text_role, queries.text_role) == ("documents", "queries")
    assert graph.stat().st_mtime_ns == before

    # The fingerprint is that of the folder: exported anew elsewhere, it is the same model.
    shutil.rmtree(cache)
    assert open_embedder(str(tmp_path / "m")).fingerprint == items.fingerprint

    # A changed folder is exported anew.
    file = tmp_path / "m" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    other = open_embedder(str(tmp_path / "m"))
    assert other.fingerprint != items.fingerprint
    assert len(graphs(cache)) == 2


@pytest.mark.long
def test_routes_with_transformers_of_their_own(tmp_path: Path, cache: Path) -> None:
    torch.manual_seed(4)
    other = Transformer(str(LIBRARY), max_seq_length=12)
    for weight in other.auto_model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    router = Router.for_query_document(
        [Transformer(str(LIBRARY)), Pooling(DIM, "mean")], [other, Pooling(DIM, "cls")]
    )
    library = save_modules(tmp_path / "m", [router, Normalize()], prompts={"query": "w3 "})
    alike(tmp_path / "m", library)
    assert len(graphs(cache)) == 2


@pytest.mark.long
def test_a_route_behind_an_onnx_file(tmp_path: Path, cache: Path) -> None:
    """The graph is the Transformer's, and each role pools in its own way."""
    router = Router.for_query_document([Pooling(DIM, "mean")], [Pooling(DIM, "cls")])
    library = bert(tmp_path / "m", [router, Normalize()])
    alike(tmp_path / "m", library)
    (graph,) = graphs(cache)
    (tmp_path / "m" / "onnx").mkdir()
    shutil.copy(graph, tmp_path / "m" / "onnx" / "model.onnx")
    for queries, encode in ((False, library.encode_document), (True, library.encode_query)):
        model = open_embedder(str(tmp_path / "m" / "onnx" / "model.onnx"), queries=queries)
        np.testing.assert_allclose(model.embed(TEXTS), encode(TEXTS), atol=1e-5)
        assert model.text_role.startswith("queries by " if queries else "documents")


def test_an_onnx_file_in_the_folder_is_used(tmp_path: Path, cache: Path) -> None:
    shutil.copytree(LIBRARY, tmp_path / "m")
    folder, file = (
        open_embedder(str(tmp_path / "m")),
        open_embedder(str(tmp_path / "m/onnx/model.onnx")),
    )
    assert folder.fingerprint == file.fingerprint
    assert not cache.exists()


EXPORT = """
import sys
from nobackfill.adopt.embedding import open_embedder
model = open_embedder(sys.argv[1])
print(model.fingerprint, float(model.embed(["w1 w2"])[0, 0]))
"""


def begun(folder: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", EXPORT, str(folder)], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.long
def test_two_processes_export_once_and_a_killed_one_leaves_nothing(
    tmp_path: Path, cache: Path
) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    killed = begun(tmp_path / "m")
    while not list(cache.glob(".tmp-*")):
        assert killed.poll() is None
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not graphs(cache) and list(cache.glob(".tmp-*"))
    both = [begun(tmp_path / "m") for _ in range(2)]
    found = [one.communicate()[0] for one in both]
    assert found[0] == found[1] and [one.returncode for one in both] == [0, 0]
    assert len(graphs(cache)) == 1 and not list(cache.glob(".tmp-*"))


def architectures() -> Iterator[tuple[str, Any, Any]]:
    from transformers import (
        MPNetConfig,
        MPNetModel,
        Qwen3Config,
        Qwen3Model,
        XLMRobertaConfig,
        XLMRobertaModel,
    )

    sizes: dict[str, Any] = {
        "vocab_size": len(WORDS), "hidden_size": DIM, "num_hidden_layers": 2,
        "intermediate_size": 8, "num_attention_heads": 2, "max_position_embeddings": 40,
    }  # fmt: skip
    yield "mpnet", MPNetModel(MPNetConfig(**sizes)), "mean"
    yield "xlm-roberta", XLMRobertaModel(XLMRobertaConfig(**sizes, pad_token_id=0)), "cls"
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=4)
    yield "qwen3", Qwen3Model(config), "lasttoken"


@pytest.mark.long
@pytest.mark.parametrize("number", range(3), ids=["mpnet", "xlm-roberta", "qwen3"])
def test_transformers_of_other_kinds(number: int, tmp_path: Path) -> None:
    torch.manual_seed(5)
    name, model, pooling = list(architectures())[number]
    base = tmp_path / name
    shutil.copytree(
        LIBRARY, base, ignore=shutil.ignore_patterns("onnx", "*.safetensors", "modules.json")
    )
    model.save_pretrained(base)
    first = Transformer(str(base), max_seq_length=24)
    library = save_modules(tmp_path / "m", [first, Pooling(DIM, pooling), Normalize()])
    alike(tmp_path / "m", library)


@pytest.mark.long
def test_vectors_other_than_the_librarys_are_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    monkeypatch.setattr("nobackfill.release.publishing.text_folder._LEAST_COSINE", 1.1)
    with pytest.raises(InvalidInputError, match="gives other vectors than sentence-transformers"):
        open_embedder(str(tmp_path / "m"))
    assert not graphs(cache) and not list(cache.glob(".tmp-*"))


def test_without_torch_the_pip_command_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigurationError, match=r"needs torch, .*pip install '\.\[sentence-tr"):
        open_embedder(str(tmp_path / "m"))


def test_a_cache_that_cannot_be_written_is_named_with_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CannotWriteError, match=r"cannot be written .* XDG_CACHE_HOME"):
        open_embedder(str(tmp_path / "m"))


def test_pickles_are_refused_by_name(tmp_path: Path, cache: Path) -> None:
    for name, modules in (("bert", None), ("static", [static()])):
        if modules is None:
            bert(tmp_path / name, [Pooling(DIM, "mean")])
        else:
            save_modules(tmp_path / name, modules)
        file = tmp_path / name / "model.safetensors"
        file.rename(file.with_name("pytorch_model.bin"))
        with pytest.raises(InvalidInputError, match=r"found pytorch_model\.bin, a pickle"):
            open_embedder(str(tmp_path / name))
    assert not graphs(cache)


@pytest.mark.long
def test_code_of_the_folder_is_never_run(tmp_path: Path) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    (tmp_path / "m" / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    file = tmp_path / "m" / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "own"}
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    file.write_text(json.dumps(config))
    for name in ("config_kwargs", "model_kwargs"):
        settings = tmp_path / "m" / "sentence_bert_config.json"
        said = json.loads(settings.read_text()) | {name: {"trust_remote_code": True}}
        settings.write_text(json.dumps(said))
    with pytest.raises(InvalidInputError, match="has code of its own, which is never run"):
        open_embedder(str(tmp_path / "m"))
    assert not (tmp_path / "ran").exists()


def test_an_adapter_and_other_folders_are_refused(tmp_path: Path) -> None:
    bert(tmp_path / "m", [Pooling(DIM, "mean")])
    (tmp_path / "m" / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="is an adapter"):
        open_embedder(str(tmp_path / "m"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"expected a model that sentence-transformers saved"):
        open_embedder(str(tmp_path / "empty"))
