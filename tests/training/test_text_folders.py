"""export.py publishes folders that `nobackfill embed` takes; it encodes as their library does."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from sentence_transformers.base.modules import Dense, Normalize, Router
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling

from nobackfill.adopt.embedding import open_embedder
from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.release.text_models import TextModel, open_text_encoder
from nobackfill.training.export.external import TEXT_MODEL
from tests.adopt.library_models import DIM, GRAPH, TEXTS, save, save_modules, static
from tests.adopt.model2vec_models import MODEL2VEC
from tests.support import trials
from tests.support.blocks import manifest
from tests.support.waiting import wait_until
from tests.training.life import run_export


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where exported ONNX files lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with trials.near():
        yield tmp_path / "cache" / "nobackfill" / "onnx"


EXPORTS = "to ONNX once, with torch; takes about 30 s of a processor and 1.0 GiB of memory"


def publish(
    tmp_path: Path, *arguments: str | Path, exports: bool = False
) -> tuple[Manifest, TextModel]:
    """Publish release 1, verify it, and open it by the code of gateways and devices."""
    repo = tmp_path / "repo"
    result = run_export(repo, 1, *arguments)
    assert result.exit_code == 0, result.output
    assert (EXPORTS in " ".join(result.output.split())) == exports
    assert verify_publication(repo).releases == (1,)
    return manifest(repo, 1), open_text_encoder(repo, manifest(repo, 1))


def alike(published: TextModel, library: Any) -> None:
    """As documents and as queries, together and one by one."""
    for role, encode in (("document", library.encode_document), ("query", library.encode_query)):
        wanted = encode(TEXTS)
        np.testing.assert_allclose(published.run(TEXTS, role), wanted, atol=1e-5)  # type: ignore[arg-type]
        for text, vector in zip(TEXTS, wanted, strict=True):
            np.testing.assert_allclose(published.run([text], role)[0], vector, atol=1e-5)  # type: ignore[arg-type]


TRANSFORMERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "of norm 1": ([Pooling(DIM, "mean"), Normalize()], {}),
    "dense, prompts, lower case": (
        [Pooling(DIM, "mean"), Dense(DIM, 5), Normalize()],
        {"prompts": {"query": "w20 ", "document": "w21 "}, "transformer": {"do_lower_case": True}},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", TRANSFORMERS)
def test_a_folder_without_an_onnx_file_becomes_a_release(
    case: str, tmp_path: Path, cache: Path
) -> None:
    modules, settings = TRANSFORMERS[case]
    library = save(tmp_path / "m", modules, **settings)
    made, published = publish(tmp_path, "--text-encoder", tmp_path / "m", exports=True)
    alike(published, library)
    assert made.recipe[TEXT_MODEL] == open_embedder(str(tmp_path / "m")).fingerprint
    assert len(list(cache.glob("*/model.onnx"))) == 1


MODES = ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]
HEADS: dict[str, list[Any]] = {
    "all modes of pooling": [
        Pooling(DIM, MODES),
        Dense(6 * DIM, 7, activation_function=torch.nn.SiLU()),
        Normalize(),
        LayerNorm(7),
    ],
    "last token": [
        Pooling(DIM, "lasttoken"),
        Dense(DIM, DIM, bias=False, activation_function=torch.nn.ReLU(), use_residual=True),
        Dense(DIM, 4, activation_function=torch.nn.Sigmoid(), use_residual=True),
    ],
    "max": [Pooling(DIM, "max")],
}


@pytest.mark.parametrize("case", HEADS)
def test_modules_behind_an_onnx_file_of_the_transformer(
    case: str, tmp_path: Path, cache: Path
) -> None:
    torch.manual_seed(3)
    for module in HEADS[case]:
        for weight in module.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    library = save(tmp_path / "m", HEADS[case])
    graph = onnx.load(GRAPH)
    # Its `sentence_embedding` comes from other modules.
    del graph.graph.output[1]
    (tmp_path / "m" / "onnx").mkdir()
    onnx.save(graph, tmp_path / "m" / "onnx" / "model.onnx")
    made, published = publish(tmp_path, "--text-encoder", tmp_path / "m")
    alike(published, library)
    assert made.recipe[TEXT_MODEL] == open_embedder(str(tmp_path / "m")).fingerprint
    assert not cache.exists()


def exporters(cache: Path) -> list[Path]:
    """Folders in /proc of the processes that export into a folder."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # A process may end meanwhile.
        with suppress(OSError):
            line = (process / "cmdline").read_bytes().decode(errors="replace")
            if "transformer_folder" in line and str(cache) in line:
                found.append(process)
    return found


def has_loaded(process: Path) -> bool:
    """Whether an exporter has loaded the model and the package that writes it.

    Its output, which breaks with the pipe to its parent, is then behind it.
    """
    with suppress(OSError):
        return "onnx_cpp2py_export" in (process / "maps").read_text()
    return False


@pytest.mark.long
def test_the_run_after_a_killed_export_reads_no_half_file(tmp_path: Path, cache: Path) -> None:
    """SIGKILL hits the command alone; the process that exports for it ends by itself."""
    library = save(tmp_path / "m", [Pooling(DIM, "mean"), Normalize()])
    options = ("--model-repo", tmp_path / "repo", "--release", "1")
    command: list[str | Path] = [sys.executable, "training/export.py", *options]
    command += ["--text-encoder", tmp_path / "m"]
    with (tmp_path / "err").open("w") as shown:
        killed = subprocess.Popen(command, stderr=shown, stdout=subprocess.DEVNULL)
    wait_until(
        lambda: any(map(has_loaded, exporters(cache))) or killed.poll() is not None,
        "an exporter writes",
        300,
    )
    assert killed.poll() is None, (tmp_path / "err").read_text()
    killed.kill()
    killed.wait()
    assert EXPORTS in (tmp_path / "err").read_text()
    wait_until(lambda: not exporters(cache), "the exporter ends", 300)
    (work,) = cache.glob(".tmp-*")
    assert not (work / "check.npz").exists(), "it went on without its parent"
    (work / "model.onnx").write_bytes(b"half of a file")
    _, published = publish(tmp_path, "--text-encoder", tmp_path / "m", exports=True)
    alike(published, library)
    assert not list(cache.glob(".tmp-*"))
    assert len(list(cache.glob("*/model.onnx"))) == 1


@pytest.mark.parametrize("limit", [None, 3])
def test_static_embeddings_become_a_release(limit: int | None, tmp_path: Path, cache: Path) -> None:
    module = static()
    if limit is not None:
        module.tokenizer.enable_truncation(limit)
    library = save_modules(tmp_path / "m", [module, Dense(6, 4), Normalize()])
    made, published = publish(tmp_path, "--text-encoder", tmp_path / "m")
    alike(published, library)
    assert made.recipe[TEXT_MODEL] == open_embedder(str(tmp_path / "m")).fingerprint
    assert not cache.exists()


@pytest.mark.long
def test_a_router_needs_its_folder_for_queries_too(tmp_path: Path) -> None:
    router = Router.for_query_document([Pooling(DIM, "cls")], [Pooling(DIM, "mean")])
    library = save(tmp_path / "m", [router, Normalize()], prompts={"query": "w3 "})
    alone = run_export(tmp_path / "repo", 1, "--text-encoder", tmp_path / "m")
    assert alone.exit_code == 65
    assert f"also give --query-encoder {tmp_path / 'm'}" in " ".join(alone.output.split())
    both = ("--text-encoder", tmp_path / "m", "--query-encoder", tmp_path / "m")
    made, published = publish(tmp_path, *both)
    alike(published, library)
    assert made.recipe[TEXT_MODEL] == open_embedder(str(tmp_path / "m")).fingerprint


def test_folders_that_no_release_can_hold_are_refused(tmp_path: Path, cache: Path) -> None:
    def refused(folder: Path) -> str:
        result = run_export(tmp_path / "repo", 1, "--text-encoder", folder)
        assert result.exit_code in (65, 66)
        assert not (tmp_path / "repo" / "release-1.json").exists()
        return " ".join(result.output.split())

    shutil.copytree(MODEL2VEC / "plain", tmp_path / "vec")
    assert ".save_pretrained(FOLDER)), and embed the texts of your pairs" in refused(
        tmp_path / "vec"
    )
    (tmp_path / "empty").mkdir()
    assert "SentenceTransformer(NAME).save_pretrained(FOLDER)" in refused(tmp_path / "empty")
    save(tmp_path / "m", [Pooling(DIM, "mean")])
    file = tmp_path / "m" / "model.safetensors"
    file.rename(file.with_name("pytorch_model.bin"))
    assert "found pytorch_model.bin, a pickle" in refused(tmp_path / "m")
    file.write_bytes((2).to_bytes(8, "little") + b"{}")
    with file.open("r+b") as opened:
        opened.truncate(513 << 20)
    assert "has weights of 513 MiB, and a release holds" in refused(tmp_path / "m")
    assert not list(cache.glob("*/model.onnx"))
