"""An export that is killed leaves nothing that the next does not sweep, and nothing in /tmp."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nobackfill.release.publishing.publish import staging_folder
from tests.training.life import Life, run_export


@pytest.mark.long
def test_a_killed_export_leaves_its_draft_to_the_next(life: Life, tmp_path: Path) -> None:
    repo, temporary = tmp_path / "model_repo", tmp_path / "tmp"
    temporary.mkdir()
    arguments = ["--release", "1", "--embedder", str(life.runs / "embedder-1")]
    command = [sys.executable, "training/export.py", "--model-repo", str(repo), *arguments]
    killed = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(temporary)})
    deadline = time.monotonic() + 120
    while not list(staging_folder(repo).glob("draft-*/embedder_1/1/*")) and killed.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    killed.kill()
    killed.wait()
    assert list(staging_folder(repo).glob("draft-*"))
    assert not list(temporary.rglob("*.onnx"))
    result = run_export(repo, 1, *arguments[2:])
    assert result.exit_code == 0, result.output
    assert not staging_folder(repo).exists()
