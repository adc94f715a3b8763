"""`python -m nobackfill.report`: write the picture of an upgrade."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.durable import write_file
from nobackfill.errors import NobackfillError, NotFoundError, few
from nobackfill.release.trust.trust import TrustedFolder
from nobackfill.report.comparison import compare, predecessor
from nobackfill.report.page import render
from nobackfill.report.pictures import read_folder
from nobackfill.terminal import visible

# Draws the pictures of a large folder, and the random order of the backfill curve.
SEED = 0


def make(model_repo: Path, release: int, images: Path | None) -> str:
    """The page of `release`, from a publication folder that is verified first.

    Raises NotFoundError, VerificationError, InvalidInputError.
    """
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
            comparison = compare(
                model_repo, manifests, manifests[old], manifests[release], pictures
            )
            basis = (
                f"Measured on {len(pictures)} of {total} images of {images.resolve().name}: each "
                "is asked, all others are the gallery. Upgraded as gateways and devices do it, by "
                "int8 transforms where they are published."
            )
        return render(manifests, release, old, comparison, basis, SEED)


def command(
    model_repo: Annotated[Path, typer.Option(help="The publication folder.")],
    release: Annotated[int, typer.Option(min=1, help="The new release.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")],
    images: Annotated[
        Path | None,
        typer.Option(help="A folder of class folders to measure and to show; it is only read."),
    ] = None,
) -> None:
    """Write one HTML file that shows what an upgrade does to a gallery."""
    write_file(output, make(model_repo, release, images).encode(), 0o644)
    print(f"report: wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    try:
        typer.run(command)
    except NobackfillError as error:
        print(visible(f"report: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
