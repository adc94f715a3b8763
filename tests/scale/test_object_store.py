"""`gateway put` from an object store, a real one: OpenStack Swift by its S3. With the gateway's own
embedding, and with a Ray cluster's nodes."""

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import quote

import pytest

from nobackfill.errors import InvalidInputError, NobackfillError, NotFoundError, UnavailableError
from nobackfill.server.bulk import fill, open_bulk_source
from tests.scale.conftest import cluster
from tests.server.conftest import Stages
from tests.server.process import command
from tests.server.support import Client, images, running
from tests.support import object_store
from tests.support.blocks import png
from tests.support.documents import blocks, page, run_script
from tests.support.object_store import KEY, PAGE, SECRET, ObjectStore
from tests.support.ports import free_port

# Listed in three answers, sent in two pieces.
COUNT = 2 * PAGE + 30
PICTURES = images(COUNT)
ODD = [
    "a b.png", "a+b.png", "100%.png", "%41.png", "größe/ä ö.JPG", "海/海.webp", "q?x=1&y=2.png",
    "#1.png", "quote'\".png", "<&>;.jpeg", "~tilde@[0].png", "deep/er/and/deeper/x.png",
]  # fmt: skip
NAMES = [*ODD, *(f"many/{n:04}.png" for n in range(COUNT - len(ODD)))]
PREFIX = "my photos/größe"
OBJECTS = {name: png(picture) for name, picture in zip(NAMES, PICTURES, strict=True)}
# Nothing but the environment has credentials.
NOWHERE = {
    "AWS_EC2_METADATA_DISABLED": "true", "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_CONFIG_FILE": "/dev/null",
}  # fmt: skip


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    """Two buckets: `photos` with pictures below `my photos/größe`, an empty one."""
    with ExitStack() as ending:
        try:
            made = ending.enter_context(object_store.running())
        except (NobackfillError, OSError) as error:
            pytest.skip(str(error))
        made.make("photos")
        made.make("nothing")
        made.put("photos", {f"{PREFIX}/{name}": data for name, data in OBJECTS.items()})
        others = {
            f"{PREFIX}/bad.png": b"no picture", f"{PREFIX}/notes.txt": b"none",
            "my photos/größer/x.png": OBJECTS["a b.png"], "x.png": OBJECTS["a b.png"],
        }  # fmt: skip
        made.put("photos", others)
        yield made


@pytest.fixture(autouse=True)
def credentials(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process and what it starts."""
    for name, value in {**NOWHERE, **store.environment}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def client(stages: Stages, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    data = tmp_path_factory.mktemp("gateway")
    with running(stages[1], data) as gateway, Client(gateway.address) as made:
        yield made


@pytest.fixture
def gallery(client: Client) -> Iterator[str]:
    client.create_gallery("g")
    yield "g"
    client.delete_gallery("g")


def put(place: str, client: Client, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """The command as it is typed; it says what it means, and no secret."""
    words = command("put", "g", place, f"--server={client.address}", "--json", *more)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == code and "Traceback" not in done.stderr, done.stderr
    assert SECRET not in done.stderr + done.stdout
    return done


def check(client: Client) -> None:
    """Each picture is there once, under its name, and is found by itself."""
    assert {item.id for item in client.list("g")} == set(NAMES)
    assert client.get_gallery("g").items == COUNT
    for name, picture in zip(NAMES, PICTURES, strict=True):
        (hit,) = client.find(picture, k=1).hits
        assert hit.id == name and hit.distance < 1e-5


def test_a_prefix_by_command(store: ObjectStore, client: Client, gallery: str) -> None:
    place = store.uri(f"photos/{PREFIX}")
    told = json.loads(put(place, client, code=65).stdout)
    assert told["stored"] == COUNT and set(told["refused"]) == {"bad.png", "notes.txt"}
    check(client)
    # As somebody types it, and again.
    plain = place.replace(quote(PREFIX), f"{PREFIX}/")
    assert plain != place
    assert json.loads(put(plain, client, code=65).stdout) == told
    check(client)


@pytest.mark.filterwarnings("default")
def test_by_nodes_each_with_credentials_of_its_own(
    store: ObjectStore, client: Client, gallery: str, stages: Stages, tmp_path: Path
) -> None:
    place = store.uri(f"photos/{PREFIX}")
    without = dict.fromkeys(store.environment, "")
    with cluster({"num_cpus": 0}, {"num_cpus": 1, "env_vars": without}) as nodes:
        ray = ("--ray", nodes.address, "--model-repo", str(stages[1]))
        said = put(place, client, *ray, code=69).stderr
        assert "AWS_ACCESS_KEY_ID" in said and "run the command again" in said
        nodes.remove_node(*nodes.worker_nodes)
        for _ in range(2):
            nodes.add_node(num_cpus=1, env_vars=store.environment)
        nodes.wait_for_nodes()
        for _ in range(2):
            told = json.loads(put(place, client, *ray, code=65).stdout)
            assert told["stored"] == COUNT and set(told["refused"]) == {"bad.png", "notes.txt"}
            check(client)
        run_document(store, client, nodes.address, stages[1], tmp_path)


def run_document(
    store: ObjectStore, client: Client, cluster: str, repo: Path, folder: Path
) -> None:
    """What docs/operations/fill.md types, of a prefix with one picture."""
    written = blocks(page("docs/operations/fill.md"), "shell")
    (script,) = (content for _, content in written if "endpoint_override" in content)
    exchanged = {
        # The test has a cluster: `ray stop` would end everybody's.
        "ray start --head": ":", "--ray auto": f"--ray {cluster}",
        "s3://bucket/photos?endpoint_override=store.example:9000&scheme=https":
            store.uri("photos/my photos/größer"),
        "AWS_ACCESS_KEY_ID=reader": f"AWS_ACCESS_KEY_ID={KEY}",
    }  # fmt: skip
    for words, ours in exchanged.items():
        assert script.count(words) == 1, words
        script = script.replace(words, ours)
    (folder / "reader.secret").write_text(SECRET)
    around = {"NOBACKFILL_SERVER": client.address, "NOBACKFILL_MODEL_REPO": str(repo)}
    client.create_gallery("photos")
    run_script(script, folder, around, 300)
    assert [item.id for item in client.list("photos")] == ["x.png"]


def test_addresses_that_are_none(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(kind: type[NobackfillError], *said: str, place: str) -> None:
        with pytest.raises(kind) as error:
            list(open_bulk_source(place).names())
        assert all(words in str(error.value) for words in said), error.value
        assert "s3cr3t" not in str(error.value)

    at = store.uri("").removeprefix("s3://")
    refused(NotFoundError, "nothing is there", "bucket", place=store.uri("fotos/x"))
    refused(NotFoundError, "nothing is there", place=store.uri("photos/my photos/gr"))
    refused(InvalidInputError, "one object", place=store.uri("photos/x.png"))
    refused(InvalidInputError, "s3://BUCKET/PREFIX", place=f"s3://{at}")
    refused(InvalidInputError, "%25", place=f"s3://photos/100%{at}")
    refused(InvalidInputError, "endpoint", place=f"s3://photos{at}&endpoint=x")
    for secret in (SECRET, SECRET.replace("/", "%2F"), SECRET + "@"):
        known = f"s3://reader:{secret}@photos/{at}"
        refused(InvalidInputError, "without a secret", "AWS_SECRET_ACCESS_KEY", place=known)
    assert list(open_bulk_source(store.uri("nothing")).names()) == []
    nobody = f"s3://photos?endpoint_override=127.0.0.1:{free_port()}&scheme=http"
    refused(UnavailableError, "cannot be read by", "network", place=nobody)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    refused(UnavailableError, "ACCESS_DENIED", "AWS_SECRET_ACCESS_KEY", place=store.uri("photos"))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    refused(UnavailableError, "ACCESS_DENIED", place=store.uri("photos/x"))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    refused(UnavailableError, "AWS_ACCESS_KEY_ID", place=store.uri("photos/my photos"))


def test_by_command_what_is_wrong_is_one_sentence(
    store: ObjectStore, client: Client, gallery: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = put(store.uri("nothing"), client, code=65).stderr
    assert said.startswith("gateway: ") and "found none" in said and len(said.splitlines()) == 1
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    said = put(store.uri("photos"), client, code=69).stderr
    assert said.startswith("gateway: ") and len(said.splitlines()) == 1
    assert client.get_gallery(gallery).items == 0


def test_objects_that_vanish_and_a_store_that_ends_in_mid_run(
    store: ObjectStore, client: Client, gallery: str
) -> None:
    pictures = [OBJECTS[name] for name in NAMES]
    store.put("photos", {f"run/{n:03}.png": picture for n, picture in enumerate(pictures)})
    place, last = store.uri("photos/run"), f"{COUNT - 1:03}.png"

    def vanish(stored: int) -> None:
        if stored == 100:
            store.delete("photos", [f"run/{last}"])

    done = fill(client, gallery, place, vanish)
    assert done.stored_count == COUNT - 1
    assert done.refusals == {
        last: "this object was deleted before it was read; upload it again, or ignore this error"
    }
    client.delete_gallery(gallery)
    client.create_gallery(gallery)

    def end(stored: int) -> None:
        if stored == 100:
            store.stop()

    try:
        with pytest.raises(UnavailableError, match="run the command again"):
            fill(client, gallery, place, end)
        assert client.get_gallery(gallery).items == 100
    finally:
        store.start()
    assert fill(client, gallery, place).stored_count == COUNT - 1
    assert client.get_gallery(gallery).items == COUNT - 1


def test_killed_half_way_and_begun_again(store: ObjectStore, client: Client, gallery: str) -> None:
    place = store.uri(f"photos/{PREFIX}")
    words = command("put", gallery, place, f"--server={client.address}")
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as half:
        assert half.stderr is not None and "99 stored" in half.stderr.readline()
        half.send_signal(signal.SIGKILL)
    assert client.get_gallery(gallery).items >= 99
    put(place, client, code=65)
    check(client)
