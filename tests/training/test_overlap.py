"""Pictures that two sets share are known by their content, and say nothing about others."""

import json
import shutil
from pathlib import Path

import pytest

from nobackfill.class_folders import list_images
from nobackfill.errors import InvalidInputError
from nobackfill.quality.listing import relevance_without_copies
from nobackfill.release.manifest import parse_manifest
from nobackfill.release.paths import manifest_path
from nobackfill.training.cli import evaluate
from nobackfill.training.export.assembly import leave_out_training_images
from tests.training.life import Life, copy_publication, invoke, run_export


def copy_of(part: Path, target: Path, every: int = 1) -> Path:
    """Class folders with every so many pictures, under other names."""
    for row, image in enumerate(sorted(part.rglob("*.png"))):
        if row % every == 0:
            folder = target / image.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(image, folder / f"renamed-{image.name}")
    return target


def test_a_querys_own_picture_is_left_out_whatever_it_is_named(life: Life, tmp_path: Path) -> None:
    """Every query lies in the gallery twice, under other names; alone, it finds nothing."""
    queries, report = life.data / "queries", tmp_path / "report.json"
    gallery = copy_of(queries, tmp_path / "gallery")
    for image in sorted(gallery.rglob("*.png")):
        shutil.copy(image, image.with_name(f"again-{image.name}"))

    def cmc1(held: Path) -> tuple[float, int, str]:
        result = invoke(
            evaluate.app, "--model-repo", life.repo, "--queries", queries, "--gallery", held,
            "--cells", "2/2", "--json", report,
        )  # fmt: skip
        assert result.exit_code == 0, result.output
        told = json.loads(report.read_text())
        return told["cells"]["2/2"]["cmc1"], told["left_out"], result.output

    # One folder with itself leaves the same pictures out, so the figure is the same.
    expected, count, _ = cmc1(queries)
    assert count == len(list_images(queries))
    found, left, output = cmc1(gallery)
    assert found == pytest.approx(expected)
    assert left == count
    assert found < 1
    assert "copy of a query is left out" in output
    assert cmc1(life.data / "gallery")[1] == 0


def test_the_same_folder_is_the_same_by_content(life: Life) -> None:
    listing = list_images(life.data / "gallery")
    assert relevance_without_copies(listing, listing)[1] == len(listing)
    assert relevance_without_copies(list_images(life.data / "queries"), listing)[1] == 0


@pytest.mark.long
def test_training_images_do_not_let_a_release_out(life: Life, tmp_path: Path) -> None:
    repo = tmp_path / "repo" / "model_repo"
    repo.parent.mkdir()
    copy_publication(life.first, repo)
    learnt = copy_of(life.data / "train", tmp_path / "learnt", every=2)
    runs = ("--embedder", life.runs / "embedder-2", "--side-encoder", life.runs / "side-2",
            "--upgrade", life.runs / "upgrade-1-2")  # fmt: skip
    refused = run_export(repo, 2, *runs, "--eval", learnt)
    assert refused.exit_code == 65, refused.output
    assert "trained on" in refused.output
    assert "--force" in refused.output
    forced = run_export(repo, 2, *runs, "--eval", learnt, "--force")
    assert forced.exit_code == 0, forced.output
    gate = parse_manifest((repo / manifest_path(2)).read_bytes()).gate
    assert gate.forced
    assert "training images" in gate.detail


def test_a_chance_copy_is_left_out_and_said(
    life: Life, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy_of(life.data / "eval", tmp_path / "eval")
    runs = [life.runs / "embedder-2"]
    whole = list_images(folder)
    assert leave_out_training_images(whole, runs, force=False) == (whole, 0)
    assert capsys.readouterr().err == ""
    trained = sorted((life.data / "train" / "3").glob("*.png"))
    for number, image in enumerate(trained):
        shutil.copy(image, folder / "3" / f"{number}.png")
        left, learnt = leave_out_training_images(list_images(folder), runs, force=False)
        if len(left) < len(whole) + number + 1:
            break
    assert (len(left), learnt) == (len(whole) + number, 0)
    assert "1 of the" in capsys.readouterr().err
    for number, image in enumerate(trained):
        shutil.copy(image, folder / "3" / f"{number}.png")
    with pytest.raises(InvalidInputError, match=r"and \d+ more"):
        leave_out_training_images(list_images(folder), runs, force=False)
