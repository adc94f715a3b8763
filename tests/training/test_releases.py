"""What export.py publishes besides FCT: chains, kept side encoders, BCT, DMU, foreign models."""

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from nobackfill.class_folders import decode_listing, list_images
from nobackfill.errors import ConfigurationError
from nobackfill.release.manifest import Manifest
from nobackfill.release.models import open_embedder, open_upgrade
from nobackfill.release.probes import check_probes
from nobackfill.release.publishing.metadata import SigningKeys
from nobackfill.release.publishing.publish import begin_publication
from nobackfill.release.routes import open_route, plan_route
from nobackfill.release.trust.trust import read_publication
from tests.training.life import (
    SIZE,
    Life,
    config_of,
    copy_publication,
    run_evaluate,
    run_export,
    train_quietly,
    upgrade_config,
)


def published(repo: Path, release: int) -> Manifest:
    manifest = read_publication(repo).manifests[release]
    check_probes(repo, manifest)
    return manifest


def export(repo: Path, release: int, *arguments: str | Path) -> Manifest:
    result = run_export(repo, release, *arguments)
    assert result.exit_code == 0, result.output
    return published(repo, release)


def cells(manifest: Manifest) -> dict[str, float]:
    return {f"{cell.query}/{cell.gallery}": cell.map for cell in manifest.evidence}


@pytest.mark.long
def test_a_third_release_with_kept_side_encoder_by_both_routes(life: Life, tmp_path: Path) -> None:
    """2 -> 3 carries the side-information; 1 -> 3 maps it; 1 -> 2 -> 3 chains."""
    images, runs = life.data / "train", tmp_path / "runs"
    shutil.copytree(life.runs, runs)
    train_quietly(config_of("embedder", runs / "embedder-3", images, seed=3, embedding_dim=20))
    third: dict[str, object] = {"new": str(runs / "embedder-3"), "epochs": 40}
    carried = third | {"old": str(runs / "embedder-2"), "old_side": str(runs / "side-2")}
    train_quietly(
        upgrade_config(runs, images, runs / "2-3", **carried, side="carries", new_side=None)
    )
    train_quietly(upgrade_config(runs, images, runs / "1-3", **third))
    repo = tmp_path / "model_repo"
    copy_publication(life.repo, repo)
    manifest = export(
        repo,
        3,
        *("--embedder", runs / "embedder-3", "--keep-side-encoder", "--eval", life.data / "eval"),
        *("--upgrade", runs / "2-3", "--upgrade", runs / "1-3"),
        # Trained on the same images as release 2, it has no reason to beat it.
        "--force",
    )
    old = published(repo, 2)
    assert manifest.side_encoder == old.side_encoder
    assert manifest.side_space == old.side_space
    assert [(u.from_release, u.side) for u in manifest.upgrades] == [(1, "maps"), (2, "carries")]
    assert {route.releases for route in manifest.routes} == {(2, 3), (1, 2, 3), (1, 3)}
    assert {"3/3", "2/2", "1/1", "3/2>3", "3/1>2>3", "3/1>3"} == set(cells(manifest))
    manifests = dict(read_publication(repo).manifests)
    best = plan_route(manifests, 1, 3, manifests[1].side_space)
    assert best is not None
    kept = {route.releases: route.retention for route in manifest.routes}
    assert best.releases == max([(1, 2, 3), (1, 3)], key=lambda chain: kept[chain])
    # Side-information passes the hop that carries it bit for bit.
    route = plan_route(manifests, 2, 3, manifests[2].side_space)
    assert route is not None
    embedding = np.eye(16, dtype=np.float32)[:4]
    side = np.ones((4, 12), np.float32)
    carried_side = open_route(repo, route).run(embedding, side).side_information
    assert carried_side is not None
    assert np.array_equal(carried_side, side)

    grown = Life(life.data, runs, repo)
    result = run_evaluate(grown, "--cells", "3/1>2>3,3/1>3,3/3,1/1")
    assert result.exit_code == 0, result.output
    assert all(name in result.output for name in ("3/1>2>3", "3/1>3"))


@pytest.mark.long
@pytest.mark.parametrize("method", ["bct", "dmu", "lambda_orthogonal"])
def test_compatible_embedders_declare_what_they_may_search(
    method: str, life: Life, tmp_path: Path
) -> None:
    run = tmp_path / "compatible"
    options: dict[str, object] = {"options": {"hidden_dim": 32}} if method == "dmu" else {}
    if method == "lambda_orthogonal":
        options = {"init": str(life.runs / "embedder-2"), "optimizer": "adam", "lr": 0.01}
    train_quietly(
        config_of(
            "embedder", run, life.data / "train", seed=2, epochs=20, method=method,
            old=str(life.runs / "embedder-1"), **options,
        )
    )  # fmt: skip
    repo = tmp_path / "model_repo"
    copy_publication(life.first, repo)
    # Whether it passes is the method's affair, not this test's.
    manifest = export(repo, 2, "--embedder", run, "--eval", life.data / "eval", "--force")
    old = published(repo, 1)
    assert manifest.method == method
    assert manifest.searches_directly == (old.space,)
    assert (manifest.space, old.space, "direct") in {
        (c.query_space, c.gallery_space, c.origin) for c in manifest.calibration
    }
    assert [u.from_release for u in manifest.upgrades] == ([1] if method == "dmu" else [])
    assert ("2/1>2" in cells(manifest)) == (method == "dmu")
    # Trained to meet the old space, it does: far above two independent models (11 %).
    assert cells(manifest)["2/1"] > 0.3


@pytest.mark.long
def test_a_variance_is_published_with_fastfill(life: Life, tmp_path: Path) -> None:
    run = tmp_path / "fastfill"
    train_quietly(upgrade_config(life.runs, life.data / "train", run, method="fastfill", epochs=40))
    repo = tmp_path / "model_repo"
    copy_publication(life.first, repo)
    manifest = export(
        repo,
        2,
        *("--embedder", life.runs / "embedder-2", "--side-encoder", life.runs / "side-2"),
        *("--upgrade", run, "--eval", life.data / "eval"),
    )
    (upgrade,) = manifest.upgrades
    assert upgrade.predicts_uncertainty
    images = decode_listing(list_images(life.data / "gallery"), SIZE)
    embedding = open_embedder(repo, published(repo, 1)).run(images)
    side = np.random.default_rng(0).normal(size=(len(images), 12)).astype(np.float32)
    uncertainty = open_upgrade(repo, manifest, upgrade).run(embedding, side).uncertainty
    assert uncertainty is not None
    assert uncertainty.shape == (len(images),)
    assert (uncertainty > 0).all()
    assert uncertainty.std() > 0


class Foreign(nn.Module):
    """Somebody's embedder: float32 [n,3,H,W] with ImageNet's mean and deviation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 10)
        )

    def forward(self, pixels: Tensor) -> Tensor:
        output: Tensor = self.layers(pixels)
        return output


MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`Foreign` in the plainest ONNX there is, made by hand; with names that are ours, too."""
    path = tmp_path_factory.mktemp("foreign") / "embedder.onnx"
    weights = {k: v.numpy() for k, v in Foreign().state_dict().items()}
    nodes = [
        onnx.helper.make_node(
            "Conv", ["image", "0.weight", "0.bias"], ["c"], strides=[2, 2], pads=[1, 1, 1, 1]
        ),
        onnx.helper.make_node("Relu", ["c"], ["image_scaled"]),
        onnx.helper.make_node("Flatten", ["image_scaled"], ["f"]),
        onnx.helper.make_node("Gemm", ["f", "3.weight", "3.bias"], ["embedding"], transB=1),
    ]
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes,
        "foreign",
        [tensor("image", onnx.TensorProto.FLOAT, ["batch", 3, SIZE, SIZE])],
        [tensor("embedding", onnx.TensorProto.FLOAT, ["batch", 10])],
        [
            onnx.numpy_helper.from_array(value, name.removeprefix("layers."))
            for name, value in weights.items()
        ],
    )
    onnx.save(
        onnx.helper.make_model(
            graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9
        ),
        path,
    )
    return path


def _options(name: str, values: tuple[float, float, float]) -> tuple[str, ...]:
    return (name, *map(str, values))


@pytest.mark.long
def test_bring_your_own_embedder_and_upgrade_its_stored_vectors(
    life: Life, foreign: Path, tmp_path: Path
) -> None:
    repo = tmp_path / "model_repo"
    channels = (*_options("--mean", MEAN), *_options("--std", STD))
    manifest = export(repo, 1, "--onnx", foreign, *channels)
    assert (manifest.method, manifest.embedder.dim) == ("brought", 10)
    assert (manifest.embedder.metric, manifest.embedder.unit) == ("squared_l2", False)

    # What their own pipeline stored long ago.
    listing = list_images(life.data / "train")
    pixels = torch.from_numpy(decode_listing(listing, SIZE)).permute(0, 3, 1, 2) / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    with torch.no_grad():
        vectors = Foreign()((pixels - mean) / std).numpy()
    np.testing.assert_allclose(
        open_embedder(repo, manifest).run(decode_listing(listing, SIZE)), vectors, atol=1e-4
    )
    np.save(tmp_path / "vectors.npy", vectors)
    (tmp_path / "paths.txt").write_text("\n".join(listing.paths), encoding="utf-8")

    stored = {
        "vectors": str(tmp_path / "vectors.npy"),
        "paths": str(tmp_path / "paths.txt"),
        "release": 1,
    }
    train_quietly(
        config_of(
            "upgrade", tmp_path / "upgrade", life.data / "train", epochs=60,
            old=stored, new=str(life.runs / "embedder-2"),
        )
    )  # fmt: skip
    second = export(
        repo,
        2,
        *("--embedder", life.runs / "embedder-2", "--upgrade", tmp_path / "upgrade"),
        *("--eval", life.data / "eval", "--force"),
    )
    assert second.upgrades[0].from_side_space is None
    assert cells(second)["2/1>2"] > cells(second)["1/1"]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ([1, 3, SIZE, SIZE], "with a free n"),
        (["n", 1, SIZE, SIZE], "3 colour channels"),
        (["n", 3, "h", "w"], "fixed height and width"),
    ],
)
def test_foreign_embedders_of_another_form_are_refused(
    shape: list[int | str], message: str, foreign: Path, tmp_path: Path
) -> None:
    model = onnx.load(foreign)
    model.graph.input.pop()
    value = onnx.helper.make_tensor_value_info("image", onnx.TensorProto.FLOAT, shape)
    model.graph.input.append(value)
    path = tmp_path / "other.onnx"
    onnx.save(model, path)
    result = run_export(tmp_path / "model_repo", 1, "--onnx", path)
    assert result.exit_code == 65
    assert message in result.output


def test_a_file_that_is_no_onnx_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"not at all")
    result = run_export(tmp_path / "model_repo", 1, "--onnx", path)
    assert result.exit_code == 65
    assert "as an ONNX file" in result.output


def test_a_model_without_its_file_of_weights_is_refused(foreign: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        onnx.load(foreign), path,
        save_as_external_data=True, location="model.data", size_threshold=0,
    )  # fmt: skip
    (tmp_path / "model.data").unlink()
    result = run_export(tmp_path / "model_repo", 1, "--onnx", path)
    assert result.exit_code == 65
    assert "as an ONNX file" in result.output


def test_a_key_that_is_not_at_hand_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    repo, usb = tmp_path / "model_repo", tmp_path / "usb" / "targets.pem"
    begin_publication(repo, SigningKeys.of_publication(repo, {"targets": usb}))
    # No run is there either, but nobody has looked for it yet.
    result = run_export(repo, 1, "--embedder", tmp_path / "run")
    assert result.exit_code == ConfigurationError.exit_code
    assert "--targets-key" in result.output
    result = run_export(repo, 1, "--embedder", tmp_path / "run", "--targets-key", usb)
    assert "train it first" in result.output
