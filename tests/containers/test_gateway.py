"""The gateway's image: nobody's, on a read-only root, drained under load, the same after a restart;
and what it says where it cannot start."""

import json
from pathlib import Path

import pytest

from tests.containers.conftest import Asker
from tests.containers.engine import Engine
from tests.server.conftest import Stages
from tests.support.disks import fill, small_disk

ADDRESS, PAGES = "127.0.0.1:50051", "127.0.0.1:9464"
COUNT = "20"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder that the container's user may write."""
    tmp_path.chmod(0o777)
    return tmp_path


def test_it_serves_drains_and_answers_the_same_after_a_restart(
    engine: Engine, asker: Asker, stages: Stages, data: Path
) -> None:
    volumes = {stages[1]: "/publication:ro", data: "/data"}
    with engine.start("gateway", volumes=volumes) as gateway:
        asker("ready", PAGES)
        assert gateway.ask("id", "-u").strip() == "10001"
        assert "Read-only" in gateway.ask("sh", "-c", "touch /opt/nobackfill/x 2>&1", check=False)
        status = gateway.ask("cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status and "NoNewPrivs:\t1" in status
        asker("fill", ADDRESS, COUNT)
        before = asker("find", ADDRESS, COUNT)
        with asker.searching(ADDRESS, COUNT) as told:
            gateway.signal("TERM")
            assert gateway.wait() == 0
            assert '"event": "draining"' in gateway.log
            gateway.restart()
            asker("ready", PAGES)
        assert told["calls"] > 50 and not told["failures"], told
        assert asker("find", ADDRESS, COUNT) == before and len(json.loads(before)) == 20
        gateway.signal("KILL")
        gateway.wait()
        gateway.restart()
        asker("ready", PAGES)
        assert asker("find", ADDRESS, COUNT) == before


def test_what_it_cannot_do_it_says(engine: Engine, stages: Stages, data: Path) -> None:
    closed = data / "closed"
    closed.mkdir(mode=0o700)
    publication = {stages[1]: "/publication:ro"}
    served = {**publication, data: "/data"}
    for volumes, env, status, said in (
        ({**publication, closed: "/data"}, {}, 73, "/data"),
        ({**publication, data: "/data:ro"}, {}, 73, "/data"),
        (served, {"NOBACKFILL_ADDRESS": "0.0.0.0:50051"}, 78, "tls_cert"),
        (served, {"NOBACKFILL_STORE": "postgresql://x@/y?host=/nowhere"}, 69, "/nowhere"),
    ):
        with engine.start("gateway", volumes=volumes, env=env) as gateway:
            assert gateway.wait() == status, gateway.log
            assert said in gateway.log.splitlines()[-1]
            assert "Traceback" not in gateway.log
    with engine.start("gateway", "serv") as gateway:
        assert gateway.wait() == 2 and "serv" in gateway.log


def test_a_full_disk_ends_nothing(
    engine: Engine, asker: Asker, stages: Stages, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "data", 16) as disk:
        disk.chmod(0o777)
        volumes = {stages[1]: "/publication:ro", disk: "/data"}
        with engine.start("gateway", volumes=volumes) as gateway:
            asker("ready", PAGES)
            asker("fill", ADDRESS, COUNT)
            fill(disk, 100_000)
            assert "CannotWriteError" in asker("overfill", ADDRESS)
            asker("find", ADDRESS, COUNT)
            assert "unexpected error" not in gateway.log
