from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn

from nobackfill.errors import VerificationError
from nobackfill.release.probes import OnnxFile, check_onnx_rules
from nobackfill.training.export.drafting import UpgradeGraph, probe_images
from nobackfill.training.export.onnx_export import check_parity, export_onnx, quantise, run_onnx
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.networks.embedder import ImageEncoder
from nobackfill.training.networks.frozen import load_encoder


@pytest.fixture(scope="module")
def encoder(runs: Path) -> ImageEncoder:
    return load_encoder(runs / "embedder-1")[0]


@pytest.fixture(scope="module")
def graph(runs: Path) -> UpgradeGraph:
    return UpgradeGraph(read_upgrade(runs / "upgrade-1-2")[0])


@pytest.fixture(scope="module")
def embedder_file(encoder: ImageEncoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "embedder.onnx"
    export_onnx(encoder, {"image": torch.from_numpy(probe_images(8, 8))}, ("embedding",), path)
    return path


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "embedding": nn.functional.normalize(torch.randn(64, 16)),
        "side": torch.randn(64, 12),
    }


@pytest.fixture(scope="module")
def upgrade_file(
    graph: UpgradeGraph, inputs: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "upgrade.onnx"
    export_onnx(graph, inputs, graph.outputs, path)
    return path


def test_no_two_products_of_an_int8_twin_overflow_16_bits(
    upgrade_file: Path, inputs: dict[str, Tensor], tmp_path: Path
) -> None:
    twin = tmp_path / "int8.onnx"
    quantise(upgrade_file, twin)
    weights = [onnx.numpy_helper.to_array(tensor) for tensor in onnx.load(twin).graph.initializer]
    # Zero points are int8 as well.
    int8 = [array.astype(int) for array in weights if array.dtype == np.int8 and array.ndim == 2]
    assert len(int8) > 2 and max(np.abs(array).max() for array in int8) > 48
    # Processors with AVX2 and without VNNI add the products of two unsigned activations so.
    assert all(2 * 255 * np.abs(array).max() < 2**15 for array in int8)


@pytest.mark.parametrize("n", [1, 3, 17])
def test_any_batch_gives_what_torch_gives(
    embedder_file: Path, encoder: ImageEncoder, n: int
) -> None:
    images = np.random.default_rng(n).integers(0, 256, (n, 8, 8, 3), dtype=np.uint8)
    got = run_onnx(embedder_file, {"image": images}, ("embedding",))[0]
    with torch.no_grad():
        expected = encoder(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(got, axis=1), 1, atol=1e-5)


def test_exported_files_pass_the_onnx_gate(embedder_file: Path, upgrade_file: Path) -> None:
    ends = (
        (("embedding", "float32", (16,)), ("side", "float32", (12,))),
        (("upgraded", "float32", (16,)), ("upgraded_side", "float32", (12,))),
    )
    twin = upgrade_file.with_name("twin.onnx")
    quantise(upgrade_file, twin)
    check_onnx_rules(
        {
            "embedder": OnnxFile(
                embedder_file, (("image", "uint8", (8, 8, 3)),), (("embedding", "float32", (16,)),)
            ),
            "upgrade": OnnxFile(upgrade_file, *ends),
            "twin": OnnxFile(twin, *ends),
        }
    )


def test_nothing_of_this_machine_is_in_the_file(embedder_file: Path) -> None:
    data = embedder_file.read_bytes()
    for word in (b".py", b"site-packages", str(Path.cwd()).encode(), b"nn.Module"):
        assert word not in data
    assert not onnx.load(embedder_file).metadata_props


def test_parity_refuses_a_file_of_other_weights(
    embedder_file: Path, encoder: ImageEncoder, tmp_path: Path
) -> None:
    model = onnx.load(embedder_file)
    weight = max(model.graph.initializer, key=lambda i: len(i.raw_data))
    values = np.frombuffer(weight.raw_data, np.float32) * 1.01
    weight.raw_data = values.astype(np.float32).tobytes()
    path = tmp_path / "other.onnx"
    onnx.save(model, path)
    inputs = {"image": torch.from_numpy(probe_images(8, 8))}
    check_parity(encoder, inputs, ("embedding",), embedder_file)
    with pytest.raises(VerificationError, match="differs from torch's") as caught:
        check_parity(encoder, inputs, ("embedding",), path)
    assert caught.value.exit_code == 65


@pytest.mark.long
def test_parity_sees_what_only_a_batch_of_one_does(tmp_path: Path) -> None:
    class BatchMean(nn.Module):
        """Subtracts the batch's mean: right for the traced batch, wrong for any other."""

        def forward(self, x: Tensor) -> Tensor:
            return x - torch.full((1, x.shape[1]), 0.25)

    module, inputs = BatchMean(), {"x": torch.rand(4, 3)}
    path = tmp_path / "m.onnx"
    export_onnx(module, inputs, ("y",), path)

    class Whole(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - (0.25 if len(x) > 1 else 0.5)

    with pytest.raises(VerificationError):
        check_parity(Whole(), inputs, ("y",), path)


def test_the_twin_is_smaller_and_near(upgrade_file: Path, inputs: dict[str, Tensor]) -> None:
    twin = upgrade_file.with_name("small.onnx")
    quantise(upgrade_file, twin)
    given = {name: tensor.numpy() for name, tensor in inputs.items()}
    outputs = ("upgraded", "upgraded_side")
    whole, small = run_onnx(upgrade_file, given, outputs), run_onnx(twin, given, outputs)
    assert "MatMulInteger" in {node.op_type for node in onnx.load(twin).graph.node}
    assert (whole[0] * small[0]).sum(1).mean() > 0.98
    assert not np.array_equal(whole[0], small[0])


def test_uncertainty_is_published_as_a_variance() -> None:
    class Constant(nn.Module):
        def __init__(self, value: Tensor) -> None:
            super().__init__()
            self.value = value

        def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
            return self.value

    from nobackfill.training.networks.transform import UpgradeNetwork

    log_variance = torch.tensor([0.0, 2.0])
    upgrade = UpgradeNetwork(
        Constant(torch.zeros(2, 3)), reads_side=False, log_variance=Constant(log_variance)
    )
    graph = UpgradeGraph(upgrade)
    assert graph.outputs == ("upgraded", "uncertainty")
    assert torch.allclose(graph(torch.zeros(2, 3))[1], torch.tensor([1.0, 7.389056]))
