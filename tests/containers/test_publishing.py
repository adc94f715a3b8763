"""The trainer's image trains and publishes, the static host's serves that to a device."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from nobackfill.release import open_embedder
from nobackfill.release.trust import read_publication
from tests.containers.engine import Container, Engine

RUNS, CONFIG = "build/digits-8px", "/opt/configs/digits-8px/"
TRAIN, EXPORT = "/opt/training/train.py", "/opt/training/export.py"
QUICK = (
    "--set",
    "images=photos",
    "--set",
    "epochs=2",
    "--set",
    "warmup_epochs=1",
    "--set",
    "batch_size=32",
)


def digits(folder: Path, each: int = 20) -> None:
    """A folder of class folders."""
    bunch = load_digits()
    for number in range(10):
        (folder / str(number)).mkdir(parents=True)
        some = bunch.images[bunch.target == number][:each]
        for row, pixels in enumerate((some * 15.9).astype(np.uint8)):
            Image.fromarray(pixels).save(folder / str(number) / f"{row}.png")


class Trainer:
    """Runs the trainer's image over a folder that it may write, with pictures in it."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        digits(folder / "photos")
        folder.chmod(0o777)

    def __call__(self, *command: str, entry: str = "python") -> str:
        """Run to the end; what it said."""
        words = ["--entrypoint", entry]
        volumes = {self.folder: "/work"}
        with self.engine.start("trainer", *command, volumes=volumes, words=words) as one:
            assert one.wait() == 0, one.log[-3000:]
            return one.log


@pytest.fixture(scope="module")
def trainer(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """After release 1 was trained and published."""
    made = Trainer(engine, tmp_path_factory.mktemp("trained"))
    made(TRAIN, CONFIG + "embedder-1.yaml", CONFIG + "side_encoder-1.yaml", *QUICK)
    made(
        *(EXPORT, "--model-repo", "model_repo", "--release", "1"),
        *("--embedder", f"{RUNS}/embedder-1", "--side-encoder", f"{RUNS}/side_encoder-1"),
    )
    return made


def test_a_release_is_trained_and_published_by_nobody_on_a_read_only_root(trainer: Trainer) -> None:
    repo = trainer.folder / "model_repo"
    (one,) = read_publication(repo).manifests.values()
    with Image.open(trainer.folder / "photos" / "3" / "0.png") as picture:
        pixels = np.repeat(np.asarray(picture)[None, :, :, None], 3, axis=-1)
    assert open_embedder(repo, one).run(pixels).shape == (1, 32)
    assert {path.stat().st_uid for path in (repo, *repo.rglob("*"))} == {10001}
    said = trainer("-c", f"id -u; touch {TRAIN} 2>&1 || echo not written", entry="sh")
    assert said.startswith("10001") and "not written" in said
    for command in ("publication", "nobackfill"):
        assert "Usage" in trainer("--help", entry=command)


def test_a_device_takes_its_releases_from_the_static_host(engine: Engine, trainer: Trainer) -> None:
    folder = trainer.folder
    published = {folder / "model_repo": "/publication:ro"}
    photos = {folder / "photos": "/photos:ro", folder / "model_repo": "/trusted:ro"}
    sleeping = ["--entrypoint", "sleep"]
    with (
        engine.start("static", volumes=published) as host,
        engine.start("gateway", "infinity", volumes=photos, words=sleeping) as device,
    ):
        serves_files_alone(host, device)
        edge = ("edge-client", "--gallery", "/tmp/gallery.sqlite")
        device.ask(
            *(*edge, "init", "--from", "http://127.0.0.1:8080", "--root", "/trusted/1.root.json")
        )
        device.ask(*edge, "add", "/photos")
        trainer(
            *(TRAIN, CONFIG + "embedder-1.yaml", *QUICK, "--set", "classes=10"),
            *("--set", f"run_dir={RUNS}/embedder-2"),
        )
        trainer(TRAIN, CONFIG + "upgrade-1-2.yaml", *QUICK)
        trainer(
            *(EXPORT, "--model-repo", "model_repo", "--release", "2", "--force"),
            *("--embedder", f"{RUNS}/embedder-2", "--side-encoder", f"{RUNS}/side_encoder-1"),
            *("--upgrade", f"{RUNS}/upgrade-1-2", "--eval", "photos"),
        )
        device.ask(*edge, "sync")
        status = json.loads(device.ask(*edge, "status", "--json"))
        assert status["release"] == 2 and status["items"] == 200, status
        hits = json.loads(device.ask(*edge, "search", "/photos/3/0.png", "--json"))
        assert hits["release"] == 2 and len(hits["hits"]) > 3, hits


def serves_files_alone(host: Container, device: Container) -> None:
    """Read-only, as nobody; a piece of a file where one is asked for; no list, no other method."""
    assert "10001" in host.ask("id", "-u")
    assert "Read-only" in host.ask("sh", "-c", "touch /publication/x 2>&1", check=False)
    asked = """
import json, sys, urllib.error, urllib.request
def told(path, method="GET", **headers):
    request = urllib.request.Request("http://127.0.0.1:8080" + path, method=method, headers=headers)
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, len(answer.read()), answer.headers["Cache-Control"]
    except urllib.error.HTTPError as error:
        return error.code, 0, None
print(json.dumps([
    told("/healthz"), told("/timestamp.json"), told("/release-1.json", Range="bytes=5-14"),
    told("/"), told("/no.json"), told("/timestamp.json", "DELETE"), told("/../etc/passwd"),
]))
"""
    answers = json.loads(device.ask("python", "-c", asked))
    health, first, piece, listing, missing, changing, outside = answers
    assert health[0] == 200 and first[0] == 200 and first[2] == "no-cache"
    assert piece[:2] == [206, 10]
    assert [listing[0], missing[0], changing[0]] == [403, 404, 403] and outside[0] in (400, 404)
