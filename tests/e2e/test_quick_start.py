"""docs/quick-start.md, run as it stands: every fenced bash and python block, in order."""

import re
import shutil
from pathlib import Path

import pytest
import yaml

from demo.data import prepare_images
from demo.serve import free_addresses
from tests.support.documents import ROOT, blocks, page, run_script

# Short trainings on few images: small batches make enough steps of them.
SHORT = {"epochs": 20, "warmup_epochs": 0, "batch_size": 16}
DEFAULT_ADDRESS = "127.0.0.1:50051"


def as_script(steps: list[tuple[str, str]]) -> str:
    """One bash script of blocks in bash and Python."""
    # Waiting for a gateway that has ended would have no end.
    lines = ["sleep() { kill -0 $(jobs -p) || exit 69; command sleep $1; }"]
    for language, text in steps:
        lines.append(text if language == "bash" else f"python - <<'PYTHON'\n{text}PYTHON")
    return "\n".join(lines)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder as the reader has it, with the digits as photos and short trainings."""
    prepare_images(tmp_path / "photos", None, seed=1, limit=60)
    (tmp_path / "training").symlink_to(ROOT / "training")
    configs = tmp_path / "configs" / "digits"
    configs.mkdir(parents=True)
    for path in (ROOT / "configs" / "digits").glob("*.yaml"):
        config = {**yaml.safe_load(path.read_text(encoding="utf-8")), **SHORT}
        (configs / path.name).write_text(yaml.safe_dump(config), encoding="utf-8")
    return tmp_path


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash here")
@pytest.mark.timeout(1200)
def test_the_quick_start_runs_as_it_stands(home: Path) -> None:
    steps = blocks(page("docs/quick-start.md"), "bash", "python")
    assert len(steps) >= 6
    address, metrics = free_addresses(2)
    script = as_script(steps).replace(DEFAULT_ADDRESS, address)
    environment = {
        "NOBACKFILL_ADDRESS": address,
        "NOBACKFILL_METRICS_ADDRESS": metrics,
        "NOBACKFILL_SERVER": address,
    }
    output = run_script(script, home, environment, 1100)
    # The last block prints five hits, all of them of release 2, with their calibrated scores.
    hits = output.strip().splitlines()[-5:]
    assert all(re.match(r"photos/server/\d/\d+\.png 2 0\.\d+\Z", hit) for hit in hits), hits
    assert not (home / "photos" / "server").exists()
    assert (home / "upgrade.html").stat().st_size > 10_000
