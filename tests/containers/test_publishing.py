"""The trainer's image trains and publishes, the static host's serves that to a device."""

import json
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

from tests.containers.engine import Container, Engine

RUNS = "build/digits-8px"
# torch's modules are compiled once.
COMPILED = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": "/work/compiled"}
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


def test_a_release_is_trained_published_served_and_taken(engine: Engine, tmp_path: Path) -> None:
    digits(tmp_path / "photos")
    tmp_path.chmod(0o777)

    def trainer(*command: str) -> None:
        with engine.start("trainer", *command, volumes={tmp_path: "/work"}, env=COMPILED) as one:
            assert one.wait() == 0, one.log[-3000:]

    train, export = ("/opt/training/train.py", "/opt/training/export.py")
    config = "/opt/configs/digits-8px/"
    trainer(train, config + "embedder-1.yaml", config + "side_encoder-1.yaml", *QUICK)
    trainer(
        *(export, "--model-repo", "model_repo", "--release", "1"),
        *("--embedder", f"{RUNS}/embedder-1", "--side-encoder", f"{RUNS}/side_encoder-1"),
    )
    published = {tmp_path / "model_repo": "/publication:ro"}
    photos = {tmp_path / "photos": "/photos:ro", tmp_path / "model_repo": "/trusted:ro"}
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
            *(train, config + "embedder-1.yaml", *QUICK, "--set", "classes=10"),
            *("--set", f"run_dir={RUNS}/embedder-2"),
        )
        trainer(train, config + "upgrade-1-2.yaml", *QUICK)
        trainer(
            *(export, "--model-repo", "model_repo", "--release", "2", "--force"),
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
