"""Models of timm, open_clip and torchvision become releases as they are, or begin a training.

Drawn at random and saved as those packages save them: no hub is asked.
"""

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
import yaml
from PIL import Image
from safetensors.torch import load_file, save_file

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.errors import ConfigurationError, NotFoundError, UnavailableError
from nobackfill.release.models import open_embedder
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.cli import export, train
from nobackfill.training.export.external import open_torchvision
from nobackfill.training.loop.run import CHECKPOINT
from nobackfill.training.networks.public_models import open_public
from tests.training.life import invoke

pytestmark = [pytest.mark.scale, pytest.mark.filterwarnings("default")]

CLIP: dict[str, Any] = {
    "model_cfg": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 32, "layers": 2, "width": 64, "head_width": 32, "patch_size": 16,
        },
        "text_cfg": {
            "context_length": 8, "vocab_size": 100, "width": 32, "heads": 2, "layers": 1,
        },
    },
    "preprocess_cfg": {
        "mean": [0.48, 0.46, 0.41], "std": [0.27, 0.26, 0.28], "interpolation": "bicubic",
        "resize_mode": "shortest",
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and nothing that it brought before."""
    pytest.importorskip("huggingface_hub", reason="timm is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def timm_folder(tmp_path: Path) -> Path:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    torch.manual_seed(1)
    model = timm.create_model("test_vit.r160_in1k", pretrained=False)
    timm.models.save_for_hf(model, tmp_path / "timm", safe_serialization=True)
    config = json.loads((tmp_path / "timm" / "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.4] * 3
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    return tmp_path / "timm"


@pytest.fixture
def clip_folder(tmp_path: Path) -> Path:
    open_clip = pytest.importorskip("open_clip", reason="open_clip is not installed")
    torch.manual_seed(2)
    folder = tmp_path / "clip"
    folder.mkdir()
    (folder / "open_clip_config.json").write_text(json.dumps(CLIP))
    model = open_clip.CLIP(**CLIP["model_cfg"])
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return folder


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    draw = np.random.default_rng(5)
    for number in range(12):
        folder = tmp_path / "photographs" / f"class-{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        # Smooth: what noise overshoots by is no matter of ours.
        small = draw.integers(0, 256, (5, 7, 3), np.uint8)
        Image.fromarray(small).resize((300, 200 + number)).save(folder / f"{number}.png")
    return tmp_path / "photographs"


def published(repo: Path, name: str, photographs: Path) -> tuple[Any, np.ndarray]:
    """Published by one command; its embedder and what it makes of the pictures."""
    done = invoke(export.app, "--model-repo", repo, "--release", "1", "--weights", name)
    assert done.exit_code == 0, done.output
    (manifest,) = read_publication(repo, repo.with_name("trusted")).manifests.values()
    pixels = decode_listing(list_images(photographs), *manifest.frame)
    return manifest, open_embedder(repo, manifest).run(pixels)


def theirs(photographs: Path, transform: Any, model: Any) -> np.ndarray:
    """As their own documentation embeds pictures."""
    listing = list_images(photographs)
    images = [Image.open(listing.root / path) for path in listing.paths]
    with torch.inference_mode():
        vectors = model(torch.stack([transform(image) for image in images]))
    return torch.nn.functional.normalize(vectors).numpy()


def test_a_model_of_timm_is_published_as_it_is(
    timm_folder: Path, photographs: Path, tmp_path: Path
) -> None:
    import timm

    name = f"timm:local-dir:{timm_folder}"
    manifest, vectors = published(tmp_path / "repo", name, photographs)
    model = timm.create_model(f"local-dir:{timm_folder}", pretrained=True, num_classes=0).eval()
    config = timm.data.resolve_model_data_config(model)
    expected = theirs(photographs, timm.data.create_transform(**config), model)
    np.testing.assert_allclose(vectors, expected, atol=5e-3)
    assert (manifest.embedder.fit, manifest.embedder.interpolation) == ("crop", "bicubic")
    assert (manifest.embedder.dim, manifest.embedder.shortest) == (model.num_features, 168)
    assert str(tmp_path) not in manifest.model_dump_json()


def test_a_model_of_open_clip_is_published_as_it_is(
    clip_folder: Path, photographs: Path, tmp_path: Path
) -> None:
    import open_clip

    name = f"open_clip:local-dir:{clip_folder}"
    manifest, vectors = published(tmp_path / "repo", name, photographs)
    model, _, transform = open_clip.create_model_and_transforms(f"local-dir:{clip_folder}")
    expected = theirs(photographs, transform, model.eval().encode_image)
    np.testing.assert_allclose(vectors, expected, atol=5e-3)
    assert manifest.embedder.dim == 16 and manifest.embedder.interpolation == "bicubic"
    assert str(tmp_path) not in manifest.model_dump_json()


@pytest.fixture
def enumerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """torchvision's own entry of a model, its weights drawn at random: their file is in the folder
    of downloads under a name with its digest."""
    torch.manual_seed(3)
    model = torchvision.models.shufflenet_v2_x0_5(weights=None)
    plain = tmp_path / "home" / "hub" / "checkpoints" / "plain.pth"
    plain.parent.mkdir(parents=True)
    torch.save(model.state_dict(), plain)
    digest = hashlib.sha256(plain.read_bytes()).hexdigest()[:8]
    plain.rename(plain.with_name(f"shuffle-{digest}.pth"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    weights = torchvision.models.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1
    address = replace(weights.value, url=f"https://download.invalid/shuffle-{digest}.pth")
    monkeypatch.setattr(weights, "_value_", address)
    model.fc = torch.nn.Identity()
    return weights, model.eval()


def test_a_model_of_torchvision_is_published_as_it_is(
    enumerated: Any, photographs: Path, tmp_path: Path
) -> None:
    weights, model = enumerated
    name = "torchvision:shufflenet_v2_x0_5/DEFAULT"
    manifest, vectors = published(tmp_path / "repo", name, photographs)
    expected = theirs(photographs, weights.transforms(), model)
    np.testing.assert_allclose(vectors, expected, atol=5e-3)
    assert (manifest.embedder.fit, manifest.embedder.shortest) == ("crop", 256)
    assert (manifest.embedder.height, manifest.embedder.dim) == (224, 1024)
    assert manifest.recipe["weights"] == name


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("torchvision:resnet1888/DEFAULT", "similar names: .*resnet18"),
        ("torchvision:resnet18", "expected IMAGENET1K_V1"),
        ("torchvision:inception_v3/DEFAULT", "publish a model of timm"),
        ("torchvision:squeezenet1_1/DEFAULT", "publish a model of timm"),
    ],
)
def test_what_torchvision_has_not_gets_a_sentence(name: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        open_torchvision(name)


def test_a_training_begins_with_them(
    timm_folder: Path, clip_folder: Path, photographs: Path, tmp_path: Path
) -> None:
    name, run = f"timm:local-dir:{timm_folder}", tmp_path / "run"
    config = tmp_path / "e.yaml"
    text = f"kind: embedder\nrun_dir: {run}\nimages: {photographs}\nepochs: 1\nlr: 0.000001\n"
    config.write_text(text + "embedding_dim: 8\nbatch_size: 4\nheld_out: 0.0\nimage_size: 160\n")
    wrong = invoke(train.app, config, "--weights", f"open_clip:local-dir:{clip_folder}")
    assert wrong.exit_code == 78 and "train with image_size: 32" in wrong.stderr
    done = invoke(train.app, config, "--weights", name)
    assert done.exit_code == 0, done.output
    assert "not pretrained: 1.bias, 1.weight" in done.stderr
    saved, given = load_file(run / CHECKPOINT), load_file(timm_folder / "model.safetensors")
    trained = saved["encoder.backbone.0.blocks.0.attn.qkv.weight"]
    torch.testing.assert_close(trained, given["blocks.0.attn.qkv.weight"], atol=1e-3, rtol=0)
    repo = tmp_path / "repo"
    out = invoke(export.app, "--model-repo", repo, "--release", "1", "--embedder", run)
    assert out.exit_code == 0, out.output
    (manifest,) = read_publication(repo, tmp_path / "trusted").manifests.values()
    assert str(tmp_path) not in manifest.model_dump_json()
    # Its pixels' norm is the model's own.
    assert list(yaml.safe_load((run / "config.yaml").read_text())["pixel_mean"]) == [0.4] * 3


@pytest.mark.parametrize(
    ("name", "kind", "why"),
    [
        ("timm:resnet1888", ConfigurationError, "similar names: resnet18"),
        ("timm:resnet18.a1_in2k", ConfigurationError, "similar names: resnet18.a1_in1k"),
        ("timm:resnet18.a1_in1k", UnavailableError, "local-dir:FOLDER"),
        ("timm:hf-hub:somebody/something", UnavailableError, "HF_HOME"),
        ("timm:local-dir:/nowhere", NotFoundError, "/nowhere"),
        ("open_clip:ViT-B-33/openai", ConfigurationError, "similar names: ViT-B-32"),
        ("open_clip:ViT-B-32", ConfigurationError, "similar names: ViT-B-32/openai"),
        ("open_clip:ViT-B-32/laion2b_s34b_b79k", UnavailableError, "NAME/FILE"),
        ("open_clip:ViT-B-32/nowhere.pt", ConfigurationError, "nowhere.pt"),
        ("open_clip:local-dir:/nowhere", NotFoundError, "/nowhere"),
    ],
)
def test_what_cannot_be_had_gets_a_sentence(name: str, kind: type[Exception], why: str) -> None:
    pytest.importorskip(name.partition(":")[0], reason="not installed")
    with pytest.raises(kind, match=why):
        open_public(name)


class _Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return self.path.touch, ()


def test_nothing_that_a_pickle_names_is_run(
    timm_folder: Path, clip_folder: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "harmful"
    (timm_folder / "model.safetensors").unlink()
    torch.save({"a": _Harmful(mark)}, timm_folder / "pytorch_model.bin")
    (clip_folder / "open_clip_model.safetensors").unlink()
    (clip_folder / "open_clip_pytorch_model.bin").write_bytes(
        pickle.dumps(_Harmful(mark), protocol=2)
    )
    for name in (f"timm:local-dir:{timm_folder}", f"open_clip:local-dir:{clip_folder}"):
        with pytest.raises(ConfigurationError, match="cannot build this model"):
            open_public(name)
    assert not mark.exists()
