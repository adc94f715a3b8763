"""What an embedder makes of pictures of one colour is told before it is published."""

from pathlib import Path

from nobackfill.release.manifest import Manifest
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.export.probes import single_colour_warnings
from tests.support import graphs, releases
from tests.training.life import Life


def draft(folder: Path, middle: float) -> tuple[Manifest, dict[str, Path]]:
    made = releases.draft(folder, 1, middle=middle)
    return made.manifest, dict(made.local_files)


def test_colours_without_a_vector_are_named(tmp_path: Path) -> None:
    (sentence,) = single_colour_warnings(*draft(tmp_path, 0.0))[:1]
    assert "a zero vector" in sentence
    assert "(black);" in sentence


def test_colours_that_are_hardly_told_apart_are_named(tmp_path: Path) -> None:
    """Off the middle by a hair each, black lies opposite to white, and grey beside one of them."""
    trouble = single_colour_warnings(*draft(tmp_path, graphs.MIDDLE))
    assert ["nearly equal" in sentence for sentence in trouble] == [True]
    assert "grey and white" in trouble[0]


def test_a_good_embedder_causes_no_words(life: Life) -> None:
    manifest = read_publication(life.repo).manifests[2]
    files = {file.path: life.repo / file.path for file in manifest.files()}
    assert single_colour_warnings(manifest, files) == []
