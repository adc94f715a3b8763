"""Run the commands of docs/operations/ in the order of its README; check its grpcurl requests."""

import json
import re
import shlex
import shutil
import socket
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from nobackfill.server.grpc.context import Role
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.settings import Settings
from nobackfill.v1 import gallery_pb2, release_pb2, search_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import images
from tests.support.blocks import png
from tests.support.documents import ROOT, lines, page, run_script

FOLDER = "docs/operations"
# secure, call, activate, improve, backup and monitor have blocks that run.
PAGES = re.findall(r"\]\((\w[\w-]*\.md)\)", page(f"{FOLDER}/README.md"))
TEXT = "\n".join(page(f"{FOLDER}/{name}") for name in PAGES)
FILES = (search_pb2, gallery_pb2, release_pb2)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl here")
def test_the_commands_run_as_they_stand(stages: Stages, tmp_path: Path) -> None:
    publish_stage(tmp_path / "model_repo", stages[1])
    shutil.copytree(stages[2], tmp_path / "next")
    script = "\n".join(lines(TEXT, "sh"))
    port, metrics = free_ports()
    script = script.replace("50051", str(port)).replace("9464", str(metrics))
    # What happens between the commands: items are put, and release 2 is published.
    fill = tmp_path / "fill.py"
    fill.write_text(PUT.format(port=port))
    (tmp_path / "image.png").write_bytes(png(images(1)[0]))
    between = f"{shlex.quote(sys.executable)} fill.py\ncp -r next/. model_repo/\n"
    script = script.replace("gateway estimate", between + "gateway estimate", 1)
    said = run_script(script, tmp_path, {"NOBACKFILL_TRITON": "in-process"}, 280)
    assert "nobackfill_active_release 2.0" in said
    assert "2026.0: 1 items, too few to measure" in said
    assert "of 50000 today" in said
    assert (tmp_path / "restored-data" / "state.json").is_file()
    exported = sorted(path.name for path in (tmp_path / "vectors").iterdir())
    assert exported in (["release-1.parquet", "release-2.parquet"], ["release-2.parquet"])


PUT = """
import os, grpc
from nobackfill.v1 import gallery_pb2 as pb
from nobackfill.v1.gallery_pb2_grpc import GalleryServiceStub
read = lambda name: open(os.environ[name], "rb").read()
credentials = grpc.composite_channel_credentials(
    grpc.ssl_channel_credentials(read("NOBACKFILL_CA_FILE")),
    grpc.access_token_call_credentials(read("NOBACKFILL_TOKEN_FILE").decode()))
with grpc.secure_channel("localhost:{port}", credentials) as channel:
    stub = GalleryServiceStub(channel)
    stub.CreateGallery(pb.CreateGalleryRequest(name="photos"))
    item = pb.PutItem(id="cat", image=open("image.png", "rb").read())
    item.metadata["year"].number = 2026
    (answer,) = stub.PutItems(iter([pb.PutItemsRequest(gallery="photos", items=[item])]))
    assert answer.stored == 1, answer
"""


def free_ports() -> tuple[int, int]:
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        return one.getsockname()[1], two.getsockname()[1]


def test_grpcurl_requests_are_the_contracts() -> None:
    methods = {
        f"{service.full_name}/{method.name}": method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    seen = 0
    for line in lines(TEXT, "grpcurl"):
        words = shlex.split(line)
        if "-d" not in words:
            continue
        method = methods[words[-1]]
        data = words[words.index("-d") + 1]
        json_format.ParseDict(json.loads(data), GetMessageClass(method.input_type)())
        seen += 1
    assert seen >= 7


def test_the_overview_lists_every_page_once() -> None:
    files = {path.name for path in (ROOT / FOLDER).glob("*.md")}
    assert sorted(PAGES) == sorted(files - {"README.md"})


def test_every_setting_role_and_series_is_documented() -> None:
    for name in Settings.model_fields:
        assert f"`{name}`" in TEXT, name
    for role in Role:
        assert f"`{role}`" in TEXT, role
    for family in Metrics().registry.collect():
        if family.name.startswith("nobackfill"):
            # A counter is written as it is scraped.
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert f"`{name}`" in TEXT, name
