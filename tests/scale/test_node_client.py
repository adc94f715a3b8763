"""A client in another language, from the protos alone and without deadlines: Node."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.conftest import Stages
from tests.server.process import ROOT, serving, triton_venv
from tests.server.support import images
from tests.support.blocks import png

MODULES = ROOT / "build" / "node" / "node_modules"


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(not (MODULES / "@grpc" / "grpc-js").is_dir(), reason="npm brought no grpc-js")
@pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")
def test_a_node_client_puts_and_finds_an_image(stages: Stages, tmp_path: Path) -> None:
    shutil.copytree(stages[1], tmp_path / "repo")
    picture = tmp_path / "a.png"
    picture.write_bytes(png(images(1)[0]))
    with serving(tmp_path / "repo", tmp_path / "data", f"--triton-venv={triton_venv()}") as served:
        script = Path(__file__).with_name("node_client.js")
        done = subprocess.run(
            ["node", script, served.address, ROOT / "protos", picture],
            env={**os.environ, "NODE_PATH": str(MODULES)},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "stored": 1,
        "hits": ["a"],
        "file": (tmp_path / "repo" / "timestamp.json").stat().st_size,
        "releases": [1],
    }
