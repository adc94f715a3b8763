"""Pretrained weights: where they come from, what is believed, what fits."""

import hashlib
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor
from torchvision.models import ResNet18_Weights, WeightsEnum
from torchvision.models._api import Weights as TorchvisionWeights
from torchvision.transforms._presets import ImageClassification

from nobackfill.errors import (
    ConfigurationError,
    NotFoundError,
    UnavailableError,
    VerificationError,
)
from nobackfill.training.cli import train
from nobackfill.training.networks.weights import (
    download_weights,
    name_without_path,
    pixel_normalisation,
    read_weights,
    read_weights_file,
)
from tests.support import hosts
from tests.training.life import invoke


@pytest.fixture(scope="module")
def resnet() -> dict[str, Tensor]:
    """A ResNet-18 of 1,000 classes, as torchvision would give it."""
    torch.manual_seed(7)
    return dict(torchvision.models.resnet18(weights=None).state_dict())


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A file server on loopback over tmp_path/host; downloads go to tmp_path/home."""
    (tmp_path / "host").mkdir()
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "host"))
    with hosts.Host(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def hosted(tmp_path: Path, tensors: dict[str, Tensor], name: str = "resnet18") -> str:
    """Put a state dict on the host under torchvision's kind of name; the name."""
    plain = tmp_path / "host" / "plain.pth"
    torch.save(tensors, plain)
    digest = hashlib.sha256(plain.read_bytes()).hexdigest()
    return plain.rename(tmp_path / "host" / f"{name}-{digest[:8]}.pth").name


def test_a_download_is_verified_and_kept(
    host: str, tmp_path: Path, resnet: dict[str, Tensor]
) -> None:
    name = hosted(tmp_path, resnet)
    path = download_weights(f"{host}/{name}")
    assert path == tmp_path / "home" / "hub" / "checkpoints" / name
    # Found again without the host's file.
    (tmp_path / "host" / name).unlink()
    assert torch.equal(
        read_weights_file(download_weights(f"{host}/{name}")).tensors["fc.bias"], resnet["fc.bias"]
    )
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(VerificationError, match=r"begins with .* delete the file"):
        download_weights(f"{host}/{name}")


def test_another_file_than_named_is_not_kept(host: str, tmp_path: Path) -> None:
    (tmp_path / "host" / "resnet18-0123abcd.pth").write_bytes(b"something else")
    with pytest.raises(VerificationError, match=r"was deleted"):
        download_weights(f"{host}/resnet18-0123abcd.pth")
    assert not list((tmp_path / "home" / "hub" / "checkpoints").iterdir())


def test_a_host_without_the_file_is_unavailable(host: str) -> None:
    with pytest.raises(UnavailableError, match="--weights FILE"):
        download_weights(f"{host}/resnet18-0123abcd.pth")


def test_a_connection_that_breaks_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer_and_reset, args=(server,))
        thread.start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/resnet18-0123abcd.pth"
        with pytest.raises(UnavailableError, match="--weights FILE"):
            download_weights(address)
        thread.join()
    assert not list((tmp_path / "home" / "hub" / "checkpoints").iterdir())


def answer_and_reset(server: socket.socket) -> None:
    """Answer one request with a part of a file, and reset the connection."""
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n" + bytes(1000))
    # Without a time to linger, closing sends a reset instead of an end.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_torchvisions_names_download_from_their_address(
    host: str, tmp_path: Path, resnet: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"{host}/{hosted(tmp_path, resnet)}"

    class ResNet18_Weights(WeightsEnum):  # type: ignore[misc]  # noqa: N801 - torchvision's
        IMAGENET1K_V1 = TorchvisionWeights(address, partial(ImageClassification, crop_size=224), {})
        DEFAULT = IMAGENET1K_V1

    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: ResNet18_Weights)
    for name in ("DEFAULT", "IMAGENET1K_V1", "ResNet18_Weights.IMAGENET1K_V1"):
        found = read_weights(name, "resnet18").tensors
        assert found.keys() == resnet.keys()
    told = pixel_normalisation("DEFAULT", "resnet18")
    assert told is not None
    assert told.mean == (0.485, 0.456, 0.406)


def test_every_name_of_torchvision_has_a_digest() -> None:
    """What `download` compares: at least eight hexadecimal digits behind the last hyphen."""
    models = torchvision.models
    for name in models.list_models(module=models):
        for weights in models.get_model_weights(name):
            digits = Path(weights.url).stem.rpartition("-")[2]
            assert len(digits) >= 8
            int(digits, 16)


@pytest.mark.parametrize(
    ("name", "backbone", "message"),
    [
        (
            "IMAGENET1K_V9",
            "resnet18",
            "no weights 'IMAGENET1K_V9' for resnet18; expected IMAGENET1K_V1",
        ),
        ("ResNet50_Weights.DEFAULT", "resnet18", "no weights 'ResNet50_Weights"),
        ("DEFAULT", "small", "torchvision has no pretrained weights for the backbone small"),
    ],
)
def test_unknown_names_are_refused(name: str, backbone: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_weights(name, backbone)
    assert ResNet18_Weights.DEFAULT.url.startswith("https://")


def test_what_a_manifest_says_of_weights_names_no_folder() -> None:
    for name, told in {
        "IMAGENET1K_V2": "IMAGENET1K_V2", "/home/me/w.pt": "w.pt", "resnet18": "resnet18",
        "timm:resnet18.a1_in1k": "timm:resnet18.a1_in1k",
        "timm:local-dir:/home/me/vit": "timm:local-dir",
        "timm:hf-hub:timm/resnet18.a1_in1k": "timm:hf-hub:timm/resnet18.a1_in1k",
        "open_clip:ViT-B-32/openai": "open_clip:ViT-B-32/openai",
        "open_clip:ViT-B-32//home/me/clip.safetensors": "open_clip:ViT-B-32/clip.safetensors",
    }.items():  # fmt: skip
        assert name_without_path(name) == told


@pytest.mark.parametrize(
    ("name", "package"),
    [("timm:resnet18", "timm"), ("open_clip:ViT-B-32/openai", "open_clip_torch")],
)
def test_a_package_that_is_missing_is_named(
    name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name.partition(":")[0], None)
    with pytest.raises(ConfigurationError, match=f"pip install {package}"):
        read_weights(name, name)


class _Harmful:
    def __reduce__(self) -> tuple[object, ...]:
        return Path("/tmp/nobackfill-harmful").touch, ()


@pytest.mark.parametrize(
    "name", ["pickle.pt", "object.pt", "text.pt", "empty.pth", "x.safetensors"]
)
def test_what_is_not_plain_tensors_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if name == "pickle.pt":
        path.write_bytes(pickle.dumps(_Harmful(), protocol=2))
    elif name == "object.pt":
        torch.save({"a": _Harmful()}, path)
    else:
        path.write_bytes(b"" if name == "empty.pth" else b"hello " * 20)
    with pytest.raises(VerificationError, match="expected safetensors, or a state dict"):
        read_weights_file(path)
    assert not Path("/tmp/nobackfill-harmful").exists()
    with pytest.raises(NotFoundError):
        read_weights_file(tmp_path / "nothing.pt")


def test_a_state_dict_inside_other_things_is_found(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(2)}, "epoch": 3}, tmp_path / "a.pt")
    assert list(read_weights_file(tmp_path / "a.pt").tensors) == ["a"]
    torch.save({"epoch": 3, "note": "no tensors"}, tmp_path / "b.pt")
    with pytest.raises(VerificationError, match="state dict of tensors by name, got no tensor for"):
        read_weights_file(tmp_path / "b.pt")
    save_file({"a": torch.ones(2)}, tmp_path / "c.safetensors", {"class_names": '["x", "y"]'})
    assert read_weights_file(tmp_path / "c.safetensors").class_names == ("x", "y")


def test_the_command_says_what_does_not_fit(
    digits: Path, tmp_path: Path, resnet: dict[str, Tensor]
) -> None:
    torch.save(resnet, tmp_path / "resnet.pt")
    config = tmp_path / "e.yaml"
    config.write_text(
        f"kind: embedder\nrun_dir: {tmp_path / 'run'}\nimages: {digits / 'queries'}\nepochs: 1\n"
        "lr: 0.01\nimage_size: 32\nbackbone: resnet18\nembedding_dim: 8\nbatch_size: 8\n"
    )
    done = invoke(train.app, config, "--weights", tmp_path / "resnet.pt")
    assert done.exit_code == 78, done.output
    assert "conv1.weight: expected shape [64, 3, 3, 3], got [64, 3, 7, 7]" in done.stderr
    assert "convolution of 3 x 3, pretrained ones with 7 x 7" in done.stderr
    assert invoke(train.app, config, "--weights", tmp_path / "typo.pt").exit_code == 66
