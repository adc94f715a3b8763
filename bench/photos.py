"""`python -m bench.photos FOLDER COUNT SIDE`: class folders of JPEGs, to read and to time.

Of 2,000 encoded pictures, smooth with noise, each file is one behind a comment of its own, so that
no two files are alike.
"""

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

PICTURES, QUALITY = 2000, 85


def write_photos(folder: Path, count: int, height: int, width: int, class_count: int) -> None:
    """FOLDER/CLASS/NUMBER.jpg, `count` of them, spread over `class_count` folders."""
    pictures = [_picture(height, width, seed) for seed in range(min(PICTURES, count))]
    for name in range(class_count):
        (folder / f"{name:04d}").mkdir(parents=True)
    for number in range(count):
        comment = f"{number:08d}".encode()
        # Behind the first marker: FF FE, the length with its own two bytes, the comment.
        segment = b"\xff\xfe" + (len(comment) + 2).to_bytes(2, "big") + comment
        picture = pictures[number % len(pictures)]
        path = folder / f"{number % class_count:04d}" / f"{number:08d}.jpg"
        path.write_bytes(picture[:2] + segment + picture[2:])


def _picture(height: int, width: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + rng.integers(-12, 13, smooth.shape, dtype=np.int16)
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=QUALITY)
    return file.getvalue()


if __name__ == "__main__":
    where, number, side = sys.argv[1:]
    write_photos(Path(where), int(number), int(side), int(side), 1000)
