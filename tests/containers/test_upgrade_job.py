"""The chart's upgrade Job, as Helm renders it: its pods are containers of the built image that run
its command, while two gateways serve the same database."""

import subprocess
from contextlib import ExitStack
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from tests.containers.conftest import JOB, Asker
from tests.containers.engine import ROOT, Container, Engine
from tests.server.conftest import Stages
from tests.server.support import running
from tests.support.blocks import manifest
from tests.support.carried import Carried
from tests.support.postgres import Server
from tests.support.waiting import wait_until

HELM = ROOT / "build" / "chart" / "layer" / "helm" / "helm"
COUNT = 20_000


@pytest.fixture(scope="module")
def pod() -> Any:
    """The template of its pods."""
    if not HELM.exists():
        pytest.skip("the chart's Job is not tested: `make chart` brings helm")
    values = "upgrade.release=2,upgrade.workers=1,upgrade.cores=1"
    rendered = subprocess.run(
        [HELM, "template", "demo", ROOT / "deploy" / "chart", "--set", values],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    (job,) = (one for one in yaml.safe_load_all(rendered) if one and one["kind"] == "Job")
    assert job["metadata"]["name"] == JOB == job["spec"]["template"]["spec"]["subdomain"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == 2
    return job["spec"]["template"]["spec"]


def start(engine: Engine, pod: Any, index: int, secrets: dict[str, str], volumes: Any) -> Container:
    """A pod of the Job, as a kubelet would start it. `volumes`: folders in place of claims, by the
    claim's name, where those of emptyDir are made, and others by their path."""
    (container,) = pod["containers"]
    assert container["image"] == engine.image("gateway")
    known = {volume["name"]: volume for volume in pod["volumes"]}
    confined = ["--user", "{runAsUser}:{runAsGroup}".format(**pod["securityContext"])]
    context = container["securityContext"]
    assert context.pop("allowPrivilegeEscalation", False) is False
    confined += ["--security-opt", "no-new-privileges"]
    confined += ["--read-only"] * context["readOnlyRootFilesystem"]
    confined += [word for one in context["capabilities"]["drop"] for word in ("--cap-drop", one)]
    mounted = {path: there for path, there in volumes.items() if isinstance(path, Path)}
    for mount in container["volumeMounts"]:
        volume, there = known[mount["name"]], mount["mountPath"]
        if "emptyDir" in volume:
            # A new folder that its user may write, as a kubelet makes it.
            folder = Path(mkdtemp(dir=volumes["emptyDir"]))
            folder.chmod(0o777)
            mounted[folder] = there
        else:
            claim = volume["persistentVolumeClaim"]["claimName"]
            mounted[volumes[claim]] = f"{there}:ro"
    env = {"JOB_COMPLETION_INDEX": str(index)}
    for one in container["env"]:
        wanted = one["valueFrom"]["secretKeyRef"]
        env[one["name"]] = secrets[f"{wanted['name']}/{wanted['key']}"]
    entry, *first = container["command"]
    return engine.start(
        "gateway", *first, *container["args"], volumes=mounted, env=env, confined=confined,
        words=["--entrypoint", entry],
    )  # fmt: skip


def test_pods_that_are_killed_are_run_again_and_nothing_is_lost_or_doubled(
    engine: Engine, asker: Asker, stages: Stages, postgres: Server, sockets: Path, pod: Any,
    tmp_path: Path,
) -> None:  # fmt: skip
    with postgres.database() as url, ExitStack() as containers:
        database = urlsplit(url).path[1:]
        with running(stages[1], tmp_path / "first", store=url):
            """Release 1 answers from now on."""
        one, two = manifest(stages[2], 1), manifest(stages[2], 2)
        carried = Carried(url, stages[2], one, two, COUNT)
        containers.callback(carried.database.close)
        secrets = {"nobackfill-store/store": f"postgresql://postgres@/{database}?host=/sockets"}
        claims = {"nobackfill-publication": stages[2], "emptyDir": tmp_path}
        volumes: dict[Any, Any] = {**claims, sockets: "/sockets"}

        def serve(number: int) -> Container:
            env = {
                "NOBACKFILL_STORE": secrets["nobackfill-store/store"],
                "NOBACKFILL_ADDRESS": f"127.0.0.1:5005{number}",
                "NOBACKFILL_METRICS_ADDRESS": f"127.0.0.1:946{number}",
            }
            mounted = {stages[2]: "/publication:ro", sockets: "/sockets"}
            return containers.enter_context(engine.start("gateway", volumes=mounted, env=env))

        def started(index: int) -> Container:
            return containers.enter_context(start(engine, pod, index, secrets, volumes))

        def done() -> int:
            """Vectors of release 2."""
            (there,) = postgres.sql("SELECT to_regclass('nobackfill_1.vectors_2')", database)
            return 0 if there == (None,) else int(
                str(postgres.sql("SELECT count(*) FROM nobackfill_1.vectors_2", database)[0][0])
            )  # fmt: skip

        gateways = [serve(1), serve(2)]
        for number in (1, 2):
            asker("ready", f"127.0.0.1:946{number}")
        addresses = "127.0.0.1:50051,127.0.0.1:50052"
        asker("fill", addresses, "20")
        with asker.searching(addresses, "20") as told, asker.changing(addresses) as changed:
            head, node = started(0), started(1)
            wait_until(lambda: done() > COUNT // 20, "the Job has begun")
            node.signal("KILL")
            assert done() < COUNT
            started(1)
            wait_until(lambda: done() > COUNT // 2, "the Job goes on without a node")
            assert done() < COUNT
            head.signal("KILL")
            assert head.wait() == 137
            again = started(0)
            status = again.wait()
            assert status == 0, (status, again.log)
        assert told["calls"] > 100 and not told["failures"], told["failures"][:20]
        assert changed["deleted"] and changed["put"]
        carried.deleted |= set(changed["deleted"])
        carried.check()
        kept = COUNT + 20 + len(changed["put"]) - len(changed["deleted"])
        assert carried.store.count() == kept and carried.store.active().spec.release == 2
        for gateway in gateways:
            assert "unexpected error" not in gateway.log
        asker("find", addresses, "20")
