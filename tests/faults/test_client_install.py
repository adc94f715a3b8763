"""The base install, for real: a fresh environment with nothing but the edge client's needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import blocks, edge

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
LARGEST_MB = 300
ABSENT = {"torch", "torchvision", "tritonclient", "hnswlib", "sklearn", "matplotlib", "structlog"}


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.skipif(not UV.exists(), reason="needs uv, as make setup installs it")
def test_the_base_install_is_light_and_lives_a_whole_life(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([UV, "venv", "--quiet", "--python", sys.executable, venv], check=True)
    subprocess.run(
        [
            UV, "pip", "install", "--quiet", "--python", venv / "bin" / "python",
            "--constraint", ROOT / "constraints.txt", ROOT,
        ],
        check=True,
    )  # fmt: skip
    packages = next((venv / "lib").glob("python*")) / "site-packages"
    size = sum(path.stat().st_size for path in packages.rglob("*") if path.is_file())
    print(f"base install: {size / 1e6:.0f} MB")
    assert size < LARGEST_MB * 1e6
    assert not ABSENT & {path.name for path in packages.iterdir()}

    def run(*arguments: str | Path) -> dict[str, object]:
        command = [venv / "bin" / "edge-client", "--gallery", tmp_path / "g.sqlite", *arguments]
        done = subprocess.run(
            [*command, "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    world = edge.World(tmp_path / "world")
    repo = tmp_path / "pub" / "repo"
    world.publish(repo, 1)
    images = blocks.write_pngs(tmp_path / "images", 5)
    run("init", "--from", repo, "--root", repo / "1.root.json")
    run("add", tmp_path / "images")
    world.publish(repo, 2)
    assert run("sync")["state"] == "upgraded"
    hits = run("search", images[0])["hits"]
    assert isinstance(hits, list)
    assert hits[0]["path"] == str(images[0])
    run("status")
    run("verify")
