"""`make demo STORE=postgresql` at tiny size: two gateways, an upgrade on Ray, the leader killed."""

import json
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.test_life import TINY, processes_of, run
from tests.support.waiting import wait_until

pytestmark = pytest.mark.timeout(1200)


def test_two_gateways_live_through_it() -> None:
    # Where root runs this, another user has to reach the database's folder.
    with tempfile.TemporaryDirectory(prefix="life-") as folder:
        Path(folder).chmod(0o755)
        out = Path(folder) / "out"
        lived = run(out, (*TINY, "--store", "postgresql"))
        assert lived.returncode == 0, lived.stderr
        assert "was killed (SIGKILL) while it led" in lived.stdout
        report = json.loads((out / "report.json").read_text(encoding="utf-8"))
        server, edge, cells = report["server"], report["edge"], report["cells"]
        assert (server["gateways"], server["killed"]) == (2, 1)
        # The gateways were given its address.
        assert not find_spec("ray") or "Ray runtime started" in (out / "logs/ray.out").read_text()
        assert (server["failed"], edge["failed_during_sync"]) == (0, 0)
        assert cells["new/upgraded"]["map"] >= 0.85 * cells["new/new"]["map"]
        assert edge["same_hits_as_server"] > 90
        assert "was killed" in (out / "report.html").read_text(encoding="utf-8")
        wait_until(lambda: not processes_of(out), "its processes end", 60)
