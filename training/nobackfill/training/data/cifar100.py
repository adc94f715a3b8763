"""Write CIFAR-100 as class folders: `python -m nobackfill.training.data.cifar100 FOLDER`.

The result is FOLDER/train and FOLDER/test with PNG files, for `compare.py --data cifar100 --images
FOLDER`. torchvision's loader downloads the data set, which consists of pickles. torchvision opens a
file only if its MD5 is the one in torchvision's source.
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
Downloads 161 MiB and writes 60,000 small files. An existing train or test
folder stays as it is; remove it to write it again.

Exit codes: 0 done, 65 the download is not CIFAR-100, 69 the host does not answer, 73 cannot write.
"""


def main(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Folder that is created if it is missing; the images are written to its folders "
            "train and test."
        ),
    ],
) -> None:
    """Download CIFAR-100 and write it as class folders."""
    write_folders(folder)
    print(f"{folder}: the folders train and test hold the images of CIFAR-100")


def write_folders(folder: Path, dataset: type[CIFAR100] = CIFAR100) -> None:
    """Write FOLDER/train and FOLDER/test, with CLASS/NUMBER.png; an existing part stays as it is.

    Downloads 161 MiB to a temporary folder in FOLDER. A part appears only when it is complete. If
    both parts exist, nothing is downloaded or looked at. The temporary folder is removed in every
    case. A part that was complete before an error stays.

    Args:
        folder: the folder, made if missing.
        dataset: torchvision's class of the data set.

    Raises:
        UnavailableError: the download failed, or its connection broke.
        VerificationError: the download has another digest.
        CannotWriteError: FOLDER cannot be written, or its disk is full.
    """
    missing = [part for part in ("train", "test") if not (folder / part).is_dir()]
    if not missing:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for part in missing:
                images = _load(dataset, scratch, part)
                _write(images, Path(scratch) / part)
                (Path(scratch) / part).rename(folder / part)
    except OSError as error:
        raise CannotWriteError(
            f"the images of CIFAR-100 cannot be written to {folder} ({error}); free space on that "
            "disk, or name another folder"
        ) from error


def _load(dataset: type[CIFAR100], scratch: str, part: str) -> CIFAR100:
    try:
        return dataset(scratch, train=part == "train", download=True)
    except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
        raise UnavailableError(
            f"CIFAR-100 cannot be downloaded from {dataset.url} ({error}); run the command again, "
            "or copy the images to FOLDER/train/CLASS and FOLDER/test/CLASS yourself"
        ) from error
    except RuntimeError as error:
        raise VerificationError(
            f"the file from {dataset.url} is not CIFAR-100 ({error}) and was deleted; run the "
            "command again, and check for a proxy that changes downloads"
        ) from error


def _write(images: CIFAR100, part: Path) -> None:
    for name in images.classes:
        (part / name).mkdir(parents=True)
    for number, (image, label) in enumerate(images):
        image.save(part / images.classes[label] / f"{number:05d}.png")


app = command_app("cifar100.py", main, _EPILOG)

if __name__ == "__main__":
    app()
