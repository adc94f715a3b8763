"""The page of a published release: what its upgrade does, measured where there are images."""

import tempfile
from pathlib import Path

from nobackfill.errors import NotFoundError, few
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.report.comparison import compare, predecessor
from nobackfill.report.links import Served
from nobackfill.report.page import render
from nobackfill.report.pictures import read_folder

# Draws the pictures of a large folder, and the random order of the backfill curve.
SEED = 0


def upgrade_page(
    model_repo: Path, release: int, images: Path | None, served: Served | None = None
) -> str:
    """The HTML of `release`, from a publication folder that is verified first.

    `images`: a folder of class folders to measure on and to show; it is only read. `served`: pages
    that it leads to. Raises NotFoundError, VerificationError, InvalidInputError.
    """
    links = () if served is None else served.links(release)
    with tempfile.TemporaryDirectory() as state:
        trusted = TrustedFolder(model_repo, Path(state))
        trusted.refresh()
        manifests = dict(trusted.manifests())
        if release not in manifests:
            raise NotFoundError(
                f"{model_repo} holds no release {release} in use; it holds "
                f"{few(sorted(manifests, reverse=True)) or 'none'}"
            )
        old = predecessor(manifests, release)
        comparison = basis = None
        if images is not None and old is not None:
            pictures, total = read_folder(images, SEED)
            for number in {old, *range(old + 1, release + 1)} & set(manifests):
                trusted.verified(number)
            comparison = compare(model_repo, manifests, old, release, pictures)
            basis = (
                f"Measured on {len(pictures)} of {total} images of {images.resolve().name}: each "
                "is asked, all others are the gallery. Upgraded as gateways and devices do it, by "
                "int8 transforms where they are published."
            )
        return render(manifests, release, old, comparison, basis, SEED, links)
