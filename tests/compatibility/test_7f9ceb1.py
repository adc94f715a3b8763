"""Everything that commit 7f9ceb1 wrote opens, and its client's calls get the same answers.

The code of that commit wrote the files of tests/fixtures/7f9ceb1; README.md there says how. Calls
are sent as the bytes of its client, and answers are read by its contract: no change of today's
code changes this test.
"""

import base64
import gc
import gzip
import importlib.metadata
import io
import json
import lzma
import math
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2

from tests.server.support import running
from tests.support.blocks import publish_block_release
from tests.support.postgres import Server
from tests.support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("near_trials")

FIXTURES = Path(__file__).parents[1] / "fixtures" / "7f9ceb1"
TIMEOUT_S = 60.0
# Processors add in different orders.
TOLERANCE = 1e-4
TOLERANCES = {
    # Where a distance is rounded to three digits, it may fall to either side.
    "Hit.score": 5e-3,
    # It is measured on 1,000 random items of 1,100.
    "UpgradeProgress.neighbours_kept": 0.02,
}

# Fields that depend on the machine or the moment.
MEASUREMENTS = {
    "CanaryPair.p50", "CanaryPair.p99", "EstimateUpgradeResponse.duration",
    "EstimateUpgradeResponse.index_duration", "EstimateUpgradeResponse.memory_bytes",
    "SpaceInfo.index", "UpgradeProgress.items_per_second", "UpgradeProgress.remaining",
    "WatchCanaryResponse.evidence",
}  # fmt: skip
# Sentences for people: whether there is one counts, not its words.
SENTENCES = {
    "ActivateReleaseResponse.message", "Gallery.note", "ItemError.message", "Release.reason",
    "SearchResponse.error", "UpgradeProgress.message", "WatchCanaryResponse.message",
}  # fmt: skip
# A gateway makes them, and the client sends them back.
TOKENS = {"next_page_token": "page_token", "request_id": "request_id"}
SESSIONS = ("gateway", "database", "midway", "killed")
# Calls that tell progress: their last message counts.
PROGRESS = {"ActivateRelease", "WatchUpgrade"}
# Calls that answer while an upgrade begins or ends: how far it is depends on the moment.
MOMENTARY = {"PauseUpgrade", "StartUpgrade"}
MOMENTARY_FIELDS = {
    "UpgradeProgress.done", "UpgradeProgress.from_release", "UpgradeProgress.neighbours_kept",
    "UpgradeProgress.re_embedded", "UpgradeProgress.state", "UpgradeProgress.total",
}  # fmt: skip
# Calls that send a file in pieces of any length.
PIECES = {"FetchFile", "GetBlob"}


def unpack(name: str, folder: Path) -> Path:
    """A copy of an archive's content."""
    with tarfile.open(FIXTURES / f"{name}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The publication of releases 1 to 3, its keys beside it."""
    return unpack("publication", tmp_path / "publication") / "repo"


class Contract:
    """The messages and services as they were."""

    def __init__(self) -> None:
        data = gzip.decompress((FIXTURES / "contract.binpb.gz").read_bytes())
        self._pool = descriptor_pool.DescriptorPool()
        self._methods: dict[str, Any] = {}
        for file in descriptor_pb2.FileDescriptorSet.FromString(data).file:
            self._pool.Add(file)
            for service in file.service:
                found = self._pool.FindServiceByName(f"{file.package}.{service.name}")
                for method in found.methods:
                    self._methods[f"/{found.full_name}/{method.name}"] = method

    def request(self, method: str, data: bytes) -> Any:
        """A request of a method, read."""
        kind = message_factory.GetMessageClass(self._methods[method].input_type)
        return kind.FromString(data)

    def response(self, method: str, data: bytes) -> Any:
        """A response of a method, read."""
        kind = message_factory.GetMessageClass(self._methods[method].output_type)
        return kind.FromString(data)

    @property
    def methods(self) -> set[str]:
        """Paths of all of them."""
        return set(self._methods)


@cache
def contract() -> Contract:
    return Contract()


@cache
def session_calls(session: str) -> Sequence[Mapping[str, Any]]:
    """The head of a recording, then each call: method, requests, responses, status."""
    data = gzip.decompress((FIXTURES / f"calls-{session}.jsonl.gz").read_bytes())
    return [json.loads(line) for line in data.splitlines()]


class Replay:
    """The calls of a session, one after another, to today's gateway."""

    def __init__(self, session: str, address: str, calls: int | None = None) -> None:
        """`calls`: the first of them, all by default."""
        self._head, *self._calls = session_calls(session)[: calls and calls + 1]
        self._channel = grpc.insecure_channel(address)
        self._started = int(time.time())
        # A recorded token, and the one that today's gateway gave in its place.
        self._tokens: dict[str, str] = {}

    def run(self) -> list[str]:
        """Where the answers differ."""
        with self._channel:
            wait_until(self._ready, "the release of the recording answers")
            return [
                f"call {number}, {call['method'].rpartition('/')[2]}: {difference}"
                for number, call in enumerate(self._calls)
                for difference in self._call_differences(call)
            ]

    def _ready(self) -> bool:
        method = "/nobackfill.v1.ReleaseService/ListReleases"
        (answer,) = self._send(method, [b""], {})
        # 3: RELEASE_STATE_ACTIVE.
        releases = contract().response(method, answer).releases
        return any(one.number == self._head["release"] and one.state == 3 for one in releases)

    def _call_differences(self, call: Mapping[str, Any]) -> Iterator[str]:
        method = call["method"]
        name = method.rpartition("/")[2]
        before = [contract().response(method, from_base64(one)) for one in call["responses"]]
        left = call["code"] == "CANCELLED"
        requests = [self._request(method, from_base64(one)) for one in call["requests"]]
        stream = self._send(method, requests, call["metadata"])
        now = []
        try:
            for data in stream:
                now.append(contract().response(method, data))
                if left and _left_at(name, before[-1], now[-1]):
                    stream.cancel()
                    break
        except grpc.RpcError:
            pass
        if not left:
            yield from _status_differences(call, stream)
        if left or name in PROGRESS:
            before, now = before[-1:], now[-1:]
        elif name in PIECES:
            before, now = _joined_pieces(before), _joined_pieces(now)
        if len(before) != len(now):
            yield f"{len(before)} messages were answered, now {len(now)}"
        for old, new in zip(before, now, strict=False):
            yield from self._compare(old, new, name)

    def _send(self, method: str, requests: list[bytes], metadata: Mapping[str, str]) -> Any:
        """Begin a call; every kind of call is a stream to gRPC."""
        sending: Any = self._channel.stream_stream(method)
        return sending(iter(requests), metadata=tuple(metadata.items()), timeout=TIMEOUT_S)

    def _request(self, method: str, data: bytes) -> bytes:
        """The recorded bytes, but for a token that this gateway gave otherwise."""
        request = contract().request(method, data)
        for name in TOKENS.values():
            token = getattr(request, name, "")
            if self._tokens.get(token, token) != token:
                setattr(request, name, self._tokens[token])
                return bytes(request.SerializeToString())
        return data

    def _compare(self, old: Any, new: Any, where: str) -> Iterator[str]:
        for field in old.DESCRIPTOR.fields:
            name = f"{old.DESCRIPTOR.name}.{field.name}"
            inside = f"{where}.{field.name}"
            momentary = where.partition(".")[0] in MOMENTARY and name in MOMENTARY_FIELDS
            if name in MEASUREMENTS or momentary:
                continue
            if field.has_presence and old.HasField(field.name) != new.HasField(field.name):
                yield f"{inside}: {'gone' if old.HasField(field.name) else 'new'}"
                continue
            a, b = getattr(old, field.name), getattr(new, field.name)
            if field.message_type is not None and field.message_type.GetOptions().map_entry:
                if set(a) != set(b):
                    yield f"{inside}: {sorted(a)} is now {sorted(b)}"
                for key in sorted(set(a) & set(b)):
                    yield from self._values(field, name, a[key], b[key], f"{inside}[{key}]")
            elif field.is_repeated:
                if len(a) != len(b):
                    yield f"{inside}: {len(a)} is now {len(b)}"
                for at, (one, other) in enumerate(zip(a, b, strict=False)):
                    yield from self._values(field, name, one, other, f"{inside}[{at}]")
            else:
                yield from self._values(field, name, a, b, inside)

    def _values(self, field: Any, name: str, old: Any, new: Any, where: str) -> Iterator[str]:
        if name in SENTENCES:
            same = bool(old) == bool(new)
        elif field.name in TOKENS:
            same = bool(old) == bool(new)
            self._tokens[old] = new
        elif hasattr(old, "ToDatetime"):
            # What happened before the recording is the same; the rest happened after its start.
            began = int(self._head["began"])
            old_s, new_s = old.seconds + old.nanos / 1e9, new.seconds + new.nanos / 1e9
            same = old_s == new_s or (old_s >= began and new_s >= self._started)
        elif hasattr(old, "DESCRIPTOR"):
            yield from self._compare(old, new, where)
            return
        elif isinstance(old, float):
            same = same_number(old, new, TOLERANCES.get(name, TOLERANCE))
        else:
            same = old == new
        if not same:
            yield f"{where}: {old!r} is now {new!r}"


def from_base64(text: str) -> bytes:
    return base64.b64decode(text)


def _left_at(name: str, old: Any, new: Any) -> bool:
    """Whether the client left a stream by this message."""
    if name == "ActivateRelease":
        return bool(new.phase == old.phase)
    # The second pair answers after the caller has its answer.
    return name != "WatchCanary" or bool(new.compared >= old.compared)


def _status_differences(call: Mapping[str, Any], stream: Any) -> Iterator[str]:
    """Differences of the status."""
    reason = ""
    for key, value in stream.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason = _reason(value)
    now = (stream.code().name, reason)
    before = (call["code"], call.get("reason", ""))
    if now != before:
        yield f"{before} is now {now}: {stream.details()}"


def _reason(details: bytes) -> str:
    for detail in status_pb2.Status.FromString(details).details:
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info):
            return str(info.reason)
    return ""


def _joined_pieces(pieces: list[Any]) -> list[Any]:
    """One message in place of all pieces of a file."""
    if pieces:
        pieces[0].chunk = b"".join(piece.chunk for piece in pieces)
    return pieces[:1]


def same_number(old: float, new: float, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers differ by the processor's arithmetic at most, also once rounded."""
    if math.isclose(old, new, rel_tol=tolerance, abs_tol=tolerance):
        return True
    unit = 10.0 ** (math.floor(math.log10(abs(old))) - 2) if old else 0.0
    rounded = all(math.isclose(one, float(f"{one:.3g}"), rel_tol=1e-6) for one in (old, new))
    return rounded and abs(old - new) <= 1.01 * unit


def test_every_call_of_the_contract_was_recorded() -> None:
    calls = {call["method"] for session in SESSIONS for call in session_calls(session)[1:]}
    assert calls == contract().methods


@pytest.mark.long
@pytest.mark.parametrize("session", ["gateway", "midway", "killed"])
def test_recorded_calls_get_the_same_answers(session: str, repo: Path, tmp_path: Path) -> None:
    data = unpack(session, tmp_path / "data")
    with running(repo, data) as gateway:
        differences = Replay(session, gateway.address).run()
    assert not differences, "\n".join(differences)


@pytest.mark.long
def test_recorded_calls_get_the_same_answers_from_a_restored_database(
    postgres: Server, repo: Path, tmp_path: Path
) -> None:
    data = unpack("database", tmp_path / "data")
    with postgres.database() as url:
        restore(postgres, url, "database")
        with running(repo, data, store=url) as gateway:
            differences = Replay("database", gateway.address).run()
    assert not differences, "\n".join(differences)


def restore(server: Server, url: str, name: str) -> None:
    """Fill a database with a dump, by PostgreSQL's own program."""
    command = [str(server.programs / "psql"), "-qX", "-v", "ON_ERROR_STOP=1", "--dbname", url]
    text = lzma.decompress((FIXTURES / f"{name}.sql.xz").read_bytes())
    # The condition of a trigger of `carry` names no schema for pgvector's `=`.
    text = text.replace(b"'search_path', ''", b"'search_path', 'public'")
    subprocess.run(command, input=text, check=True, capture_output=True)


class EdgeClient:
    """Run `edge-client` on a copy of a device's files, in this process."""

    def __init__(self, name: str, folder: Path) -> None:
        devices = unpack("devices", folder)
        self.gallery = devices / name / "gallery.sqlite"
        self.photo = str(devices / "photos" / "20-0002.png")
        self.photos = devices / "photos"

    def run(self, *words: str) -> dict[str, Any]:
        """Run a command; the JSON that it prints."""
        return command("edge-client", "--gallery", str(self.gallery), *words, "--json")

    def check(self, name: str, before: Mapping[str, Any]) -> None:
        """Compare what a command prints with what it printed."""
        words = {
            "search": ("search", self.photo, "-k", "6"),
            "search --where": ("search", self.photo, "--where", "trip=alps"),
        }.get(name, (name,))
        assert_same_output(before, self.run(*words), name)


def command(name: str, *words: str) -> dict[str, Any]:
    """Run one of our commands in this process; the JSON that it prints."""
    (point,) = importlib.metadata.entry_points(group="console_scripts", name=name)
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
        patch.setattr(sys, "argv", [name, *words])
        try:
            point.load()()
        except SystemExit as ending:
            assert not ending.code, said.getvalue()
        finally:
            # A search turns the collector off, as its process ends with it.
            gc.enable()
    answer: dict[str, Any] = json.loads(said.getvalue())
    return answer


# Where the files lie here, and how large they are on this disk.
LOCAL_KEYS = {"bytes_on_disk", "gallery", "query"}


def assert_same_output(before: Any, now: Any, where: str) -> None:
    """Compare two outputs; keys may have come since."""
    if isinstance(before, dict):
        for key in before.keys() - LOCAL_KEYS:
            assert_same_output(before[key], now[key], f"{where}.{key}")
    elif isinstance(before, list):
        assert len(before) == len(now), where
        for at, (old, new) in enumerate(zip(before, now, strict=True)):
            assert_same_output(old, new, f"{where}[{at}]")
    elif isinstance(before, float):
        assert same_number(before, now), where
    else:
        assert before == now, where


@cache
def device_outputs() -> Mapping[str, Mapping[str, Any]]:
    """Output of each command by device, as JSON."""
    outputs: Mapping[str, Mapping[str, Any]]
    outputs = json.loads(gzip.decompress((FIXTURES / "devices.json.gz").read_bytes()))
    return outputs


# Calls that look at two galleries.
FEW_CALLS = 40
DEVICES = ("first", "followed", "interrupted", "rolled-back", "vault")


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_a_device_answers_as_it_did(name: str, tmp_path: Path) -> None:
    device = EdgeClient(name, tmp_path)
    for asked, before in device_outputs()[name].items():
        device.check(asked, before)


@pytest.mark.parametrize("name", DEVICES)
def test_a_device_follows_the_publication_and_returns(
    name: str, repo: Path, tmp_path: Path
) -> None:
    """Release 3 embeds as release 1 does, into another block: distances are those of release 1,
    but for the int8 twin that led to release 2."""
    device = EdgeClient(name, tmp_path / "devices")
    assert device.run("sync", "--from", str(repo))["release"] == 3
    before = device_outputs()["first"]["search"]["hits"]
    hits = device.run("search", device.photo, "-k", "6")["hits"]
    assert [hit["id"] for hit in hits] == [hit["id"] for hit in before]
    assert [hit["distance"] for hit in hits] == pytest.approx(
        [hit["distance"] for hit in before],
        abs=0.02 if device_outputs()[name]["status"]["release"] == 2 else TOLERANCE,
    )
    assert {(hit["release"], hit["origin"]) for hit in hits} == {(3, "upgraded")}
    device.run("rollback")
    device.check("search", device_outputs()[name]["search"])


def test_the_publisher_goes_on(repo: Path, tmp_path: Path) -> None:
    publish_block_release(repo, 4, [3])
    verified = command("publication", "verify", f"--model-repo={repo}", "--json")
    assert verified["releases"] == [1, 2, 3, 4]
    device = EdgeClient("followed", tmp_path / "devices")
    assert device.run("sync", "--from", str(repo))["release"] == 4


def test_the_vault_gives_back_what_was_pushed(repo: Path, tmp_path: Path) -> None:
    device = EdgeClient("vault", tmp_path / "devices")
    with running(repo, unpack("gateway", tmp_path / "data")) as gateway:
        pushed = device.run("push", "--vault", f"grpc://{gateway.address}")
        assert (pushed["pushed"], pushed["held"]) == (0, 6)
        device.run("pull", "--to", str(tmp_path / "pulled"))
    photos = sorted(device.photos.iterdir())
    pulled = sorted(path for path in (tmp_path / "pulled").rglob("*") if path.is_file())
    assert [path.read_bytes() for path in pulled] == [path.read_bytes() for path in photos]


def test_a_backup_is_restored(repo: Path, tmp_path: Path) -> None:
    backup = unpack("backup", tmp_path / "backup")
    command("gateway", "data", "restore", str(backup), f"--data={tmp_path / 'data'}", "--json")
    with running(repo, tmp_path / "data") as gateway:
        differences = Replay("gateway", gateway.address, FEW_CALLS).run()
    assert not differences, "\n".join(differences)


def test_a_map_carries_as_it_did(tmp_path: Path) -> None:
    folder = unpack("adoption", tmp_path)
    command(
        "nobackfill", "carry", str(folder / "old"), "--map", str(folder / "map.npz"),
        "--to", "again", "--json",
    )  # fmt: skip
    before, now = (np.load(folder / "old" / f"{name}.npy") for name in ("carried", "again"))
    np.testing.assert_allclose(now, before, atol=1e-5)


def test_a_table_is_carried_on_and_taken_back(postgres: Server, tmp_path: Path) -> None:
    """30 rows came and one changed since 7f9ceb1 carried 200."""
    folder = unpack("adoption", tmp_path)
    ids = np.load(folder / "old" / "ids.npy").tolist()
    expected = dict(zip(ids, np.load(folder / "old" / "carried.npy"), strict=True))
    expected["item-0"] = expected["item-1"]
    with postgres.connected() as (url, connection):
        restore(postgres, url, "adoption")
        source = (f"{url}#t", "--to", "n", "--json")
        done = command("nobackfill", "carry", *source, "--map", str(folder / "map.npz"))
        assert (done["written"], done["total"]) == (31, 230)
        rows = connection.execute("SELECT id, n::text FROM t").fetchall()
        assert {row[0] for row in rows} == set(expected)
        for name, vector in rows:
            np.testing.assert_allclose(json.loads(vector), expected[name], atol=1e-5)
        command("nobackfill", "carry", *source, "--rollback")
        left = connection.execute(
            "SELECT column_name::text FROM information_schema.columns WHERE table_name = 't'"
        )
        assert {row[0] for row in left} == {"id", "v"}
        triggers = connection.execute("SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal")
        assert triggers.fetchone() == (0,)
