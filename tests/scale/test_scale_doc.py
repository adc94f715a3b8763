"""docs/scale.md: its commands run, top to bottom: from one gateway on SQLite to three."""

import re
import shutil
from pathlib import Path

from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.server.test_operations_doc import free_ports
from tests.support.documents import PATH, lines, page, run_script
from tests.support.postgres import Server

TEXT = page("docs/scale.md")


def test_the_commands_run_as_they_stand(stages: Stages, tmp_path: Path, postgres: Server) -> None:
    publish_stage(tmp_path / "model_repo", stages[1])
    shutil.copytree(stages[2], tmp_path / "next")
    with (
        running(tmp_path / "model_repo", tmp_path / "gateway-data") as gateway,
        Client(gateway.address) as client,
    ):
        client.create_gallery("photos")
        client.put_images(images(20), "photos")
    script = "\n".join(lines(TEXT, "sh"))
    for fixed in ("50051", "9464", "50064"):
        script = script.replace(fixed, str(free_ports()[0]))
    for number in (1, 2, 3):
        port, metrics = free_ports()
        script = script.replace(f"127.0.0.1:5006{number}", f"127.0.0.1:{port}")
        ports = f"port_{number}={port} metrics_{number}={metrics}"
        script = script.replace("start() {", f"{ports}\nstart() {{")
    script = script.replace("127.0.0.1:5006$1", "127.0.0.1:$(eval echo \\$port_$1)")
    script = script.replace("127.0.0.1:946$1", "127.0.0.1:$(eval echo \\$metrics_$1)")
    script = script.replace("gateway activate 2", "cp -r next/. model_repo/\ngateway activate 2")
    with postgres.database() as url, postgres.database() as restored:
        for name, address in (("DATABASE", url), ("RESTORED", restored)):
            (line,) = (one for one in script.splitlines() if one.startswith(f"export {name}="))
            script = script.replace(line, f"export {name}='{address}'")
        around = {"NOBACKFILL_TRITON": "in-process", "PATH": f"{postgres.programs}:{PATH}"}
        said = run_script(script, tmp_path, around, 600)
    # Copied beside the gateway, then once more after it.
    assert re.findall(r"photos\W+20\W+(\d+)\W+0\W+yes", said) == ["20", "0"], said
    assert said.count("release 2") >= 5
    # What was brought back, told last.
    assert re.search(r"photos\W+20\W+release 2", said[said.rindex("gallery") :]), said
