"""From runs to a release: what an embedder's method lets it declare about older ones."""

from pathlib import Path

import pytest

from nobackfill.release.trust.trust import read_publication
from tests.training.life import (
    Life,
    config_of,
    copy_publication,
    run_export,
    train_quietly,
    upgrade_config,
)


@pytest.mark.long
def test_a_compatible_embedder_of_another_dimension_says_what_it_cannot_search(
    life: Life, tmp_path: Path
) -> None:
    run = tmp_path / "wide"
    train_quietly(
        config_of(
            "embedder", run, life.data / "train", seed=2, epochs=2, method="bct", embedding_dim=20,
            old=str(life.runs / "embedder-1"),
        )
    )  # fmt: skip
    repo = tmp_path / "model_repo"
    copy_publication(life.first, repo)
    result = run_export(repo, 2, "--embedder", run, "--eval", life.data / "eval", "--force")
    assert result.exit_code == 0, result.output
    assert "release 2 cannot search vectors of release 1 directly, although method bct" in (
        result.output
    )
    assert "they have 20 dimensions, the vectors 16" in result.output
    assert read_publication(repo).manifests[2].searches_directly == ()


@pytest.mark.long
def test_bt2_is_published_with_an_upgrade_into_its_longer_space(life: Life, tmp_path: Path) -> None:
    runs = {"old": str(life.runs / "embedder-1"), "init": str(life.runs / "embedder-2")}
    train_quietly(
        config_of(
            "embedder", tmp_path / "bt2", life.data / "train", method="bt2", embedding_dim=32,
            optimizer="adam", lr=0.01, **runs,
        )
    )  # fmt: skip
    train_quietly(
        upgrade_config(
            life.runs, life.data / "train", tmp_path / "upgrade", method="residual",
            new=str(tmp_path / "bt2"), epochs=40,
        )
    )  # fmt: skip
    repo = tmp_path / "model_repo"
    copy_publication(life.first, repo)
    result = run_export(
        repo,
        2,
        *("--embedder", tmp_path / "bt2", "--side-encoder", life.runs / "side-2"),
        *("--upgrade", tmp_path / "upgrade", "--eval", life.data / "eval"),
    )
    assert result.exit_code == 0, result.output
    manifest = read_publication(repo).manifests[2]
    # Its first elements meet the old vectors; a gallery's vectors have one dimension.
    assert manifest.embedder.dim == 32 and manifest.searches_directly == ()
    maps = {f"{cell.query}/{cell.gallery}": cell.map for cell in manifest.evidence}
    assert maps["2/1>2"] > maps["1/1"]
