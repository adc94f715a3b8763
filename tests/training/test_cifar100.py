"""CIFAR-100 by torchvision's loader, from a host on loopback that serves a small one."""

import functools
import hashlib
import http.server
import pickle
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.datasets import CIFAR100

from nobackfill.errors import CannotWriteError, UnavailableError, VerificationError
from nobackfill.training.data.cifar100 import write_folders
from tests.support import hosts

CLASSES = ["apple", "bear", "cup"]
PER_CLASS = {"train": 4, "test": 2}


def pixels(part: str) -> np.ndarray:
    rng = np.random.default_rng(len(part))
    return rng.integers(0, 256, (len(CLASSES) * PER_CLASS[part], 3, 32, 32), dtype=np.uint8)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[type[CIFAR100]]:
    """A data set of the same make: three classes, its own digests, its archive on loopback."""
    folder = tmp_path / "host" / "cifar-100-python"
    folder.mkdir(parents=True)
    contents: dict[str, object] = {"meta": {"fine_label_names": CLASSES}}
    for part, count in PER_CLASS.items():
        data = pixels(part)
        contents[part] = {
            "data": data.reshape(len(data), -1),
            "fine_labels": [row % len(CLASSES) for row in range(count * len(CLASSES))],
        }
    digests = {}
    for name, content in contents.items():
        (folder / name).write_bytes(pickle.dumps(content, protocol=2))
        digests[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    archive = folder.parent / "cifar-100-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, folder.name)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder.parent)
    with hosts.Host(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        small = {
            "url": f"http://127.0.0.1:{server.server_port}/{archive.name}",
            "tgz_md5": hashlib.md5(archive.read_bytes()).hexdigest(),
            "train_list": [["train", digests["train"]]],
            "test_list": [["test", digests["test"]]],
            "meta": {**CIFAR100.meta, "md5": digests["meta"]},
        }
        yield type("Small", (CIFAR100,), small)
        server.shutdown()


def test_the_folders_hold_every_image_under_its_class(host: type[CIFAR100], tmp_path: Path) -> None:
    write_folders(tmp_path / "cifar", host)
    assert sorted(path.name for path in (tmp_path / "cifar").iterdir()) == ["test", "train"]
    for part, count in PER_CLASS.items():
        data = pixels(part)
        for row in range(count * len(CLASSES)):
            path = tmp_path / "cifar" / part / CLASSES[row % len(CLASSES)] / f"{row:05d}.png"
            np.testing.assert_array_equal(
                np.asarray(Image.open(path)), data[row].transpose(1, 2, 0)
            )
        assert len(list((tmp_path / "cifar" / part).glob("*/*.png"))) == len(data)


def test_what_is_there_is_kept_and_the_other_part_comes(
    host: type[CIFAR100], tmp_path: Path
) -> None:
    (tmp_path / "cifar" / "train" / "own").mkdir(parents=True)
    write_folders(tmp_path / "cifar", host)
    assert [path.name for path in (tmp_path / "cifar" / "train").iterdir()] == ["own"]
    assert len(list((tmp_path / "cifar" / "test").glob("*/*.png"))) == 6


def test_another_file_is_refused_before_it_is_opened(host: type[CIFAR100], tmp_path: Path) -> None:
    host.train_list = [["train", hashlib.md5(b"another").hexdigest()]]
    with pytest.raises(VerificationError, match=r"is not CIFAR-100 .* was deleted"):
        write_folders(tmp_path / "cifar", host)
    host.tgz_md5 = hashlib.md5(b"another").hexdigest()
    with pytest.raises(VerificationError, match="and was deleted"):
        write_folders(tmp_path / "cifar", host)
    assert list((tmp_path / "cifar").iterdir()) == []


def test_no_host_and_no_folder_are_told_apart(host: type[CIFAR100], tmp_path: Path) -> None:
    host.url = "http://127.0.0.1:9/cifar-100-python.tar.gz"
    with pytest.raises(UnavailableError, match="copy the images to FOLDER/train"):
        write_folders(tmp_path / "cifar", host)
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(CannotWriteError):
        write_folders(tmp_path / "file", host)
