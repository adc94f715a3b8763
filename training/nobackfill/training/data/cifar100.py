"""`python -m nobackfill.training.data.cifar100 FOLDER`: CIFAR-100 as FOLDER/train and FOLDER/test,
class folders of PNG, for `compare.py --data cifar100 --images FOLDER`.

torchvision's own loader downloads it. The data set comes as pickles: torchvision opens a file only
if its MD5 is the one that torchvision's source names.
"""

import tempfile
import urllib.error
from pathlib import Path
from typing import Annotated

import typer
from torchvision.datasets import CIFAR100

from nobackfill.errors import CannotWriteError, UnavailableError, VerificationError
from nobackfill.training.cli.command import command_app

_EPILOG = """
Downloads 161 MiB and writes 60,000 small files. What is there already is kept; remove the folder to
write it anew.

Exit codes: 0 done, 65 what came is not CIFAR-100, 69 the host does not answer, 73 cannot write.
"""


def main(
    folder: Annotated[Path, typer.Argument(help="where train and test shall be")],
) -> None:
    """Download CIFAR-100 and write it as class folders."""
    write_folders(folder)
    print(f"{folder}: train and test")


def write_folders(folder: Path, dataset: type[CIFAR100] = CIFAR100) -> None:
    """Write FOLDER/train and FOLDER/test, CLASS/NUMBER.png in them; complete parts are kept.

    Raises UnavailableError without a network, VerificationError for a file of another digest,
    CannotWriteError where FOLDER cannot be written.
    """
    missing = [part for part in ("train", "test") if not (folder / part).is_dir()]
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as beside:
            for part in missing:
                images = _load(dataset, beside, part)
                _write(images, Path(beside) / part)
                (Path(beside) / part).rename(folder / part)
    except OSError as error:
        raise CannotWriteError(f"{folder}: cannot be written ({error})") from error


def _load(dataset: type[CIFAR100], beside: str, part: str) -> CIFAR100:
    try:
        return dataset(beside, train=part == "train", download=True)
    except urllib.error.URLError as error:
        raise UnavailableError(
            f"{dataset.url}: cannot be downloaded ({error}); where there is no network, bring the "
            "images as folders train and test of class folders"
        ) from error
    except RuntimeError as error:
        raise VerificationError(
            f"{dataset.url}: what came is not CIFAR-100 ({error}); nothing was kept"
        ) from error


def _write(images: CIFAR100, part: Path) -> None:
    for name in images.classes:
        (part / name).mkdir(parents=True)
    for number, (image, label) in enumerate(images):
        image.save(part / images.classes[label] / f"{number:05d}.png")


app = command_app("cifar100.py", main, _EPILOG)

if __name__ == "__main__":
    app()
