"""docs/releases.md: its exports run as they stand, on real training runs."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt.cli import app as adopt
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.release.publishing.metadata import Role, SigningKeys
from nobackfill.release.publishing.publish import begin_publication
from nobackfill.training.cli import export
from tests.adopt.models import WORDS, text_model, topical
from tests.support import graphs, trials
from tests.support.blocks import manifest
from tests.support.documents import blocks, lines, page
from tests.training.life import Life, invoke
from tests.training.test_text_upgrades import known

PAGE = page("docs/releases.md")
COMMAND = "python training/export.py "
EXPORTS = [line.removeprefix(COMMAND) for line in lines(PAGE, "sh") if line.startswith(COMMAND)]
REPO = Path("model_repo")


def brought(line: str) -> bool:
    """Whether it publishes what was not trained here."""
    return any(option in line for option in ("--text-encoder", "--onnx", "--vectors-of"))


@pytest.mark.parametrize(
    "line",
    [
        line
        for line in EXPORTS
        if brought(line) and "--upgrade" not in line and "--adapter" not in line
    ],
)
def test_models_of_others_are_published(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("models/minilm", "models/documents", "models/queries", "clip/text"):
        table = np.random.default_rng(0).normal(size=(len(WORDS), graphs.DIM)).astype(np.float32)
        text_model(tmp_path / folder, 1, table=table)
    weights = graphs.into_block(graphs.projection(graphs.BLOCK, 1), 1)
    encoder = graphs.encoder("vector", weights, unit=True)
    encoder.graph.input[0].name = encoder.graph.node[0].input[0] = "pixels_of_theirs"
    graphs.save(encoder, tmp_path / "clip" / "image.onnx")
    monkeypatch.chdir(tmp_path)
    with trials.near():
        result = invoke(export.app, *shlex.split(line))
    assert result.exit_code == 0, result.output


@pytest.mark.long
def test_a_map_that_the_page_fits_upgrades_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, _ = fits()
    topical(tmp_path / "models" / "minilm", 6, 16, strength=1.0, turned=0)
    topical(tmp_path / "models" / "mpnet", 6, 16, strength=4.0, turned=1)
    monkeypatch.chdir(tmp_path)
    run_on_texts(block.splitlines())
    assert manifest(REPO, 2).gate.verdict == "passed"


@pytest.mark.long
def test_an_adapter_that_the_page_fits_searches_old_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old model hears two words in each query that nobody said."""
    upgrade, block = fits()
    topical(tmp_path / "models" / "minilm", 6, 16, strength=1.0, turned=0)
    declared = tmp_path / "models" / "minilm" / "model.json"
    declared.write_text('{"query_prefix": "w30 w31 "}')
    topical(tmp_path / "models" / "mpnet", 6, 16, strength=1.0, turned=1)
    monkeypatch.chdir(tmp_path)
    embeds = [line for line in upgrade.splitlines() if line.startswith("nobackfill embed")]
    run_on_texts([*embeds, *block.splitlines()])
    made = manifest(REPO, 2)
    assert (made.gate.verdict, made.upgrades) == ("passed", ())
    assert [adapter.to_release for adapter in made.adapters] == [1]


def fits() -> list[str]:
    """Return the blocks of the page that fit a map, for an upgrade, and an adapter."""
    return [text for _, text in blocks(PAGE, "sh") if "nobackfill fit" in text]


def run_on_texts(rows: list[str]) -> None:
    """Publish release 1 and run lines of the page, in the current folder."""
    for name in ("known", "held-out"):
        known(Path(f"{name}.jsonl"))
    (first,) = (line for line in EXPORTS if line.endswith("--text-encoder models/minilm"))
    with trials.near():
        for line in (COMMAND + first, *rows):
            words = shlex.split(line.removeprefix(COMMAND).removeprefix("nobackfill "))
            result = invoke(export.app if line.startswith(COMMAND) else adopt, *words)
            assert result.exit_code == 0, f"{line}\n{result.output}"


@pytest.mark.long
def test_the_exports_of_the_page_run(
    life: Life, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(EXPORTS) >= 2
    plain = [line for line in EXPORTS if "--targets-key" not in line and not brought(line)]
    offline = [line for line in EXPORTS if "--targets-key" in line]
    for name, exports in (("plain", plain), ("offline", offline)):
        (tmp_path / name / "images").mkdir(parents=True)
        (tmp_path / name / "images" / "held-out").symlink_to(life.data / "eval")
        (tmp_path / name / "runs").symlink_to(life.runs)
        monkeypatch.chdir(tmp_path / name)
        if name == "offline":
            keys: dict[Role, Path] = {"targets": Path("offline/targets.pem")}
            begin_publication(REPO, SigningKeys.of_publication(REPO, keys))
        for line in exports:
            result = invoke(export.app, *shlex.split(line))
            assert result.exit_code == 0, f"{line}\n{result.output}"
        assert verify_publication(REPO).releases == tuple(range(1, len(exports) + 1))
