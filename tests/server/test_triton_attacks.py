"""Other users of the machine get nothing out of the gateway's Triton; code runs in it by no way."""

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from nobackfill.errors import ConfigurationError, UnavailableError, VerificationError
from nobackfill.server.settings import load_settings
from nobackfill.server.triton.client import TritonClient, remote_client
from nobackfill.server.triton.models import model_config
from tests.server.conftest import Stages
from tests.server.process import ROOT, Served, serving, triton_venv
from tests.server.support import Client, images
from tests.support.ports import free_port
from tests.support.processes import children
from tests.support.waiting import wait_until

NOBODY = 65534
ATTACK = Path(__file__).with_name("triton_attack.py")
needs_triton = pytest.mark.skipif(triton_venv() is None, reason="no Triton here: run make setup")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@pytest.fixture(scope="module")
def served(stages: Stages) -> Iterator[Served]:
    """A gateway with its Triton, in folders that anybody may enter as far as we let them."""
    folder = Path(tempfile.mkdtemp(prefix="attacked-"))
    try:
        (folder / "data").mkdir()
        shutil.copytree(stages[1], folder / "repo")
        for path in (folder, folder / "data"):
            path.chmod(0o755)
        with (
            serving(folder / "repo", folder / "data", f"--triton-venv={triton_venv()}") as served,
            Client(served.address) as client,
        ):
            client.create_gallery("g")
            client.put_images(images(2))
            yield served
    finally:
        shutil.rmtree(folder)


def attack(user: int, marker: Path, addresses: list[str]) -> dict[str, dict[str, str]]:
    command = [sys.executable, str(ATTACK), str(user), str(marker), *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def listening(pids: set[int]) -> dict[int, set[int]]:
    """TCP ports that processes listen on, by process."""
    ports = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                ports[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found: dict[int, set[int]] = {pid: set() for pid in pids}
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                port = ports.get(str(descriptor.readlink()))
                found[pid] |= {port} if port is not None else set()
    return found


def sockets(served: Served) -> list[Path]:
    data = served.log.parent / "data"
    return [path for path in data.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]


@needs_triton
def test_triton_listens_on_no_port(served: Served) -> None:
    below = children(served.process.pid)
    assert not {pid: ports for pid, ports in listening(below).items() if ports}
    own = listening({served.process.pid})[served.process.pid]
    expected = {int(address.rpartition(":")[2]) for address in (served.address, served.metrics)}
    assert own == expected


@needs_triton
@needs_root
def test_another_user_reaches_nothing(served: Served, tmp_path: Path) -> None:
    ports = listening({served.process.pid, *children(served.process.pid)})
    addresses = [f"127.0.0.1:{port}" for found in ports.values() for port in sorted(found)]
    (socket,) = sockets(served)
    marker = Path(tempfile.gettempdir()) / f"attacked-{served.process.pid}"
    found = attack(NOBODY, marker, [*addresses, f"unix:{socket}"])
    assert len(found) == 3
    for address, statuses in found.items():
        assert not [name for name, status in statuses.items() if status == "OK"], address
    assert "ermission denied" in found[f"unix:{socket}"]["live"]
    assert not marker.exists()
    with Client(served.address) as client:
        assert client.find(images(1)[0]).hits[0].id == "i0"
    # The same program as our own user: it is the folder that stops it, not a fault of its own.
    ours = tmp_path / "marker"
    assert attack(os.getuid(), ours, [f"unix:{socket}"])[f"unix:{socket}"]["load"] == "OK"
    assert ours.exists()


@needs_triton
@needs_root
def test_another_user_reads_no_pixels(served: Served) -> None:
    memory = sorted(Path("/dev/shm").glob(f"nobackfill-{served.process.pid}-*"))
    assert memory
    modes = {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in memory}
    assert modes == {0}
    for path in memory:
        done = subprocess.run(
            [
                *("setpriv", "--reuid", str(NOBODY), "--regid", str(NOBODY), "--clear-groups"),
                *("cat", str(path)),
            ],
            capture_output=True,
        )
        assert b"ermission denied" in done.stderr
        assert not done.stdout


@needs_triton
def test_nothing_secret_is_told_to_other_users(served: Served) -> None:
    """Command lines are readable by all: Triton's holds no secret, because there is none."""
    for pid in children(served.process.pid):
        assert b"restricted" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    folder = served.log.parent / "data" / "triton"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


GOOD = 'name: "embedder_1" backend: "onnxruntime" max_batch_size: 4'


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("onnxruntime", "python"),
        GOOD + ' parameters { key: "EXECUTION_ENV_PATH" value: { string_value: "env.tar.gz" } }',
        GOOD + ' runtime: "evil.so"',
        GOOD + ' default_model_filename: "../../evil.py"',
        GOOD + ' platform: "ensemble"',
        GOOD + ' model_operations { op_library_filename: "evil.so" }',
        GOOD.replace("embedder_1", "embedder_2"),
        GOOD + " what",
        "",
    ],
)
def test_a_configuration_runs_nothing_but_onnx(tmp_path: Path, text: str) -> None:
    config = tmp_path / "embedder_1" / "config.pbtxt"
    config.parent.mkdir()
    config.write_text(text)
    with pytest.raises(VerificationError, match=r"embedder_1/config\.pbtxt"):
        model_config(tmp_path, "embedder_1")
    config.write_text(GOOD)
    assert json.loads(model_config(tmp_path, "embedder_1"))["backend"] == "onnxruntime"


@pytest.fixture
def remote(served: Served, tmp_path: Path) -> Iterator[str]:
    """Somebody's own tritonserver, with TLS and every protocol behind a token; its address."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    venv = triton_venv()
    assert venv is not None
    site = next(venv.glob("lib/python3*/site-packages"))
    asked = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
    libraries = subprocess.check_output([venv / "bin" / "python", "-c", asked], text=True).strip()
    port = free_port()
    folder = served.log.parent
    with (tmp_path / "triton.log").open("wb") as log:
        server = subprocess.Popen(
            [
                site / "pytriton/tritonserver/bin/tritonserver",
                f"--model-repository={folder / 'repo'}", "--model-control-mode=explicit",
                f"--backend-directory={folder / 'data/triton/backends'}",
                "--allow-http=false", "--allow-metrics=false", "--grpc-address=127.0.0.1",
                f"--grpc-port={port}", "--strict-readiness=false",
                "--grpc-use-ssl=true", f"--grpc-server-cert={tmp_path / 'cert.pem'}",
                f"--grpc-server-key={tmp_path / 'key.pem'}",
                f"--grpc-root-cert={tmp_path / 'ca.pem'}",
                "--grpc-restricted-protocol=health,metadata,inference,shared-memory,model-config,"
                "model-repository,statistics,trace,logging:nobackfill-token=secret",
            ],
            env={
                "LD_LIBRARY_PATH": f"{site / 'nvidia_pytriton.libs'}:{libraries}",
                "PATH": f"{venv / 'bin'}:{os.environ['PATH']}",
            },
            stdout=log, stderr=log,
        )  # fmt: skip
    yield f"grpcs://127.0.0.1:{port}"
    server.terminate()
    server.wait(30)


@needs_triton
def test_somebody_elses_triton_by_tls_and_token(
    remote: str, served: Served, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text("secret\n")
    client = remote_client(remote, tmp_path / "ca.pem", tmp_path / "token")
    with contextlib.closing(client):
        wait_until(lambda: client.is_live(1.0), "Triton with TLS answers")
        config = model_config(served.log.parent / "repo", "embedder_1")
        client.load("embedder_1", config, 60)
        assert client.infer("embedder_1", {"image": images(2)}, "embedding", 30).shape[0] == 2
    (tmp_path / "wrong").write_text("wrong")
    for token in (None, tmp_path / "wrong"):
        with contextlib.closing(remote_client(remote, tmp_path / "ca.pem", token)) as stranger:
            assert not stranger.is_live(5.0)
            with pytest.raises((UnavailableError, VerificationError), match="restricted"):
                stranger.load("embedder_1", config, 5)
    with contextlib.closing(TritonClient(remote.removeprefix("grpcs://"), None, "secret")) as plain:
        assert not plain.is_live(2.0)


@pytest.mark.parametrize("triton", ["127.0.0.1:8001", "in-process", None])
def test_a_token_for_triton_never_travels_in_the_clear(triton: str | None) -> None:
    with pytest.raises(ConfigurationError, match="never travels unencrypted"):
        load_settings({"triton": triton, "triton_token_file": "token"}, None)
    load_settings({"triton": "grpcs://127.0.0.1:8001", "triton_token_file": "token"}, None)


def test_files_for_triton_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="missing"):
        remote_client("grpcs://127.0.0.1:1", tmp_path / "missing", None)
    (tmp_path / "token").write_bytes(b"\xff\n")
    with pytest.raises(ConfigurationError, match="ASCII"):
        remote_client("grpcs://127.0.0.1:1", None, tmp_path / "token")
