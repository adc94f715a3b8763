"""Drafts in the staging folder: a living maker's stays, a killed one's is removed by the next."""

import subprocess
import sys
from pathlib import Path

import pytest

from nobackfill import durable
from nobackfill.release.publishing.publish import draft_folder, lock_path, publish, staging_folder
from tests.support.releases import draft

DRAFTING = """
import sys, time
from pathlib import Path
from nobackfill.release.publishing.publish import draft_folder
with draft_folder(Path(sys.argv[1])) as folder:
    (folder / "model.onnx").write_bytes(b"half of it")
    print(folder, flush=True)
    time.sleep(600)
"""


def begun(repo: Path) -> tuple[subprocess.Popen[str], Path]:
    """Another process that puts a release together."""
    maker = subprocess.Popen(
        [sys.executable, "-c", DRAFTING, str(repo)], stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    folder = Path(maker.stdout.readline().strip())
    assert folder.parent == staging_folder(repo)
    return maker, folder


@pytest.mark.parametrize("next_one", ["draft", "publish"])
def test_a_living_makers_draft_stays_and_a_killed_ones_goes(next_one: str, tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    releases = [draft(tmp_path / "drafts", 1)]
    releases.append(draft(tmp_path / "drafts", 2, [releases[0].manifest]))

    def come_next() -> None:
        if next_one == "publish":
            publish(repo, releases.pop(0))
        else:
            with draft_folder(repo) as folder:
                assert folder.is_dir()
            assert not folder.exists()

    maker, folder = begun(repo)
    try:
        come_next()
        assert (folder / "model.onnx").exists()
    finally:
        maker.kill()
        maker.communicate()
    assert (folder / "model.onnx").exists()
    come_next()
    assert not staging_folder(repo).exists()


def test_a_draft_is_gone_after_its_maker_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), draft_folder(tmp_path / "repo") as folder:
        (folder / "model.onnx").write_bytes(b"x")
        raise RuntimeError
    assert not staging_folder(tmp_path / "repo").exists()


def test_a_publisher_at_work_does_not_keep_a_draft_from_its_end(tmp_path: Path) -> None:
    repo = tmp_path / "repo"
    with draft_folder(repo) as folder, durable.lock_file(lock_path(repo)):
        pass
    with draft_folder(repo) as folder:
        lock = durable.lock_file(lock_path(repo))
        lock.__enter__()
    lock.__exit__(None, None, None)
    assert not folder.exists()
