"""tritonserver, started by hand as docs/architecture.md says, serves a publication folder."""

import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from demo import serve
from tests.e2e.conftest import Place
from tests.support import releases
from tests.support.blocks import publish_block_release
from tests.support.documents import ROOT, blocks, page

PATIENCE = 200
VENV = ROOT / ".venv-triton"


def documented_command() -> str:
    found = [text for _, text in blocks(page("docs/architecture.md"), "sh") if "TRITON=" in text]
    assert len(found) == 1
    return found[0]


@pytest.mark.long
@pytest.mark.skipif(not VENV.exists(), reason="Triton's environment is not set up (make setup)")
def test_the_documented_command_serves_every_model(place: Place, tmp_path: Path) -> None:
    publish_block_release(place.repo, 2, [1])
    (address,) = serve.free_addresses(1)
    script = (
        documented_command()
        .replace("build/demo/model_repo", str(place.repo))
        .replace("build/demo/gateway/triton/backends", str(tmp_path / "data/triton/backends"))
        .replace("--grpc-port=8001", f"--grpc-port={address.split(':')[1]}")
        .replace("$TRITON/pytriton/tritonserver/bin", "exec $TRITON/pytriton/tritonserver/bin")
    )
    # `exec` cannot follow assignments of its own line: export them.
    script = script.replace("PATH=$PWD", "export PATH=$PWD").replace(" \\\n  exec", "\nexec")
    with (tmp_path / "triton.log").open("wb") as log:
        server = subprocess.Popen(["bash", "-ec", script], cwd=ROOT, stdout=log, stderr=log)
    try:
        with triton.InferenceServerClient(address) as client:
            wait_until_ready(client, server)
            embeddings = []
            for release in (1, 2):
                image = triton.InferInput("image", [3, 8, 8, 3], "UINT8")
                image.set_data_from_numpy(releases.images(3))
                answer = client.infer(f"embedder_{release}", [image])
                embeddings.append(answer.as_numpy("embedding"))
            # Each release in its own block of the vector: the right model answered each time.
            assert np.allclose(np.linalg.norm(embeddings[0], axis=1), 1, atol=1e-4)
            assert np.allclose((embeddings[0] * embeddings[1]).sum(axis=1), 0)
    finally:
        server.terminate()
        server.wait()


def wait_until_ready(client: triton.InferenceServerClient, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        assert server.poll() is None, "tritonserver ended"
        try:
            if client.is_server_ready():
                return
        except triton.InferenceServerException:
            pass
        time.sleep(0.2)
    raise AssertionError("tritonserver is not ready")
