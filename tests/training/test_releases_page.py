"""docs/releases.md: its exports run as they stand, on real training runs."""

import shlex
from pathlib import Path

import numpy as np
import pytest

from nobackfill.release.publishing.inspection import verify
from nobackfill.release.publishing.keys import Keys, Role
from nobackfill.release.publishing.publish import begin_publication
from nobackfill.training.cli import export
from tests.adopt.models import WORDS, text_model
from tests.support import graphs, trials
from tests.support.documents import lines, page
from tests.training.life import Life, invoke

COMMAND = "python training/export.py "
EXPORTS = [
    line.removeprefix(COMMAND)
    for line in lines(page("docs/releases.md"), "sh")
    if line.startswith(COMMAND)
]
REPO = Path("model_repo")


def brought(line: str) -> bool:
    """Whether it publishes what was not trained here."""
    return any(option in line for option in ("--text-encoder", "--onnx", "--vectors-of"))


@pytest.mark.parametrize("line", [line for line in EXPORTS if brought(line)])
def test_models_of_others_are_published(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("models/minilm", "clip/text"):
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
            begin_publication(REPO, Keys.beside(REPO, keys))
        for line in exports:
            result = invoke(export.app, *shlex.split(line))
            assert result.exit_code == 0, f"{line}\n{result.output}"
        assert verify(REPO).releases == tuple(range(1, len(exports) + 1))
