"""Crash points of the gateway's own life, run as `python -m tests.faults.server_sweep KIND ...`.

A process of its own, because each point is a fork: the parent imports everything, but opens no gRPC
channel and no onnxruntime session. Prints one JSON object: for each operation the number of points.
"""

import functools
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nobackfill.durable import FAULT_INJECTOR
from nobackfill.errors import NobackfillError, NotFoundError
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.release import trial
from nobackfill.server.embedding.embedding import InProcessModels
from nobackfill.server.galleries.item_writer import NewItem
from nobackfill.server.gateway import GatewayServer
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.rollout import Phase, RolloutEvent, RolloutRun
from nobackfill.server.settings import Settings
from nobackfill.server.state import Canary, RolloutName
from nobackfill.server.storage import open_storage
from nobackfill.server.vault import Blob
from tests.support import releases
from tests.support.blocks import png, publish_block_release
from tests.support.crash import KILLED, run_with_fault, sweep
from tests.support.memory import memory_folder

COUNT = 12
PIXELS = releases.images(COUNT + 6)
CIPHERTEXT = b"age-encryption.org/v1\n" + b"sealed" * 50


class Life:
    """A gateway on a data folder, without its gRPC server: what a service call would work on."""

    def __init__(self, top: Path) -> None:
        settings = Settings(model_repo=top / "repo", data=top / "data")
        self.top = top
        self.gateway = GatewayServer(settings)
        self.gateway.assemble(InProcessModels(top / "repo"), Metrics(), open_storage(settings))
        self.gateway.load()

    def resume(self) -> None:
        """What a restarted gateway does by itself."""
        run = self.gateway.activations.resume()
        if run is not None:
            check(self.followed(run)[-1].phase == Phase.DONE, "a resumed activation ends well")

    def followed(self, run: RolloutRun) -> list[RolloutEvent]:
        """All that it reports. A query meets its canary: without one it is not promoted."""
        events = []
        for event in run.events():
            events.append(event)
            if event.phase == Phase.CANARY:
                for hosted in self.gateway.galleries.all():
                    self.gateway.searching.search(hosted, png(PIXELS[0]), 1, None)
        return events

    def close(self) -> None:
        self.gateway.galleries.close()


def check(good: bool, what: str) -> None:
    """As assert, but not to be switched off."""
    if not good:
        raise AssertionError(what)


# Goes its step by itself.
CANARY = Canary(share=0.5, steps=(1.0,), every_s=0.01)


def activate(
    life: Life, release: int, kind: RolloutName | None = None, canary: Canary | None = None
) -> None:
    there = all(hosted.active_spec().release == release for hosted in life.gateway.galleries.all())
    if life.gateway.state.current.active == release and there:
        return
    events = life.followed(life.gateway.activations.start(release, kind, canary=canary))
    if events[-1].phase == Phase.FAILED:
        raise NobackfillError(events[-1].message)


def first(life: Life) -> None:
    activate(life, 1)


def create(life: Life) -> None:
    if "g" not in {hosted.name for hosted in life.gateway.galleries.all()}:
        life.gateway.lifecycle.create("g")


def put(life: Life, start: int, count: int) -> None:
    """Items in batches of 3, each told to the side file once it is acknowledged."""
    for i in range(start, start + count, 3):
        numbers = range(i, min(i + 3, start + count))
        puts = [NewItem(f"i{n}", png(PIXELS[n]), {"n": float(n)}) for n in numbers]
        outcome = life.gateway.item_writer.put(life.gateway.galleries.peek("g"), puts)
        check(not outcome.refusals, "good items are stored")
        with (life.top / "acknowledged").open("a") as file:
            file.writelines(f"i{n}\n" for n in numbers)


def go_back(life: Life) -> None:
    if life.gateway.state.current.active != 1:
        life.gateway.rollbacks.roll_back(1)


def end_old(life: Life) -> None:
    if life.gateway.state.current.retired != (1,):
        life.gateway.rollbacks.retire_old_releases()


def store_blob(life: Life) -> None:
    blob = Blob("ab" * 32, len(CIPHERTEXT), hashlib.sha256(CIPHERTEXT).hexdigest())
    held = life.gateway.vault.put("a", blob, 0, [])
    life.gateway.vault.put("a", blob, held, [CIPHERTEXT[held:200], CIPHERTEXT[max(held, 200) :]])


def delete(life: Life) -> None:
    try:
        life.gateway.galleries.delete("g")
    except NotFoundError:
        return


OPERATIONS: dict[str, Callable[[Life], None]] = {
    "first activation": first,
    "create gallery": create,
    "put items": functools.partial(put, start=0, count=COUNT),
    "activate, cutover": functools.partial(activate, release=2, kind="cutover"),
    "put in two spaces": functools.partial(put, start=COUNT, count=6),
    "roll back": go_back,
    "activate, dual": functools.partial(activate, release=2, kind="dual"),
    "roll back again": go_back,
    "activate, canary": functools.partial(activate, release=2, canary=CANARY),
    "retire": end_old,
    "vault": store_blob,
    "delete gallery": delete,
}


def run(top: Path, operation: Callable[[Life], None]) -> None:
    life = Life(top)
    try:
        life.resume()
        operation(life)
    finally:
        life.close()


def dump(top: Path) -> dict[str, Any]:
    """Everything that matters of a data folder: vectors by item and space, state, blobs."""
    state = json.loads((top / "data" / "state.json").read_bytes())
    result: dict[str, Any] = {key: state[key] for key in ("active", "previous", "retired")}
    for path in sorted((top / "data" / "galleries").glob("[a-z]*/gallery.sqlite")):
        with SqliteGallery.open(path) as store:
            for info in store.spaces():
                space, items = info.spec.space, {}
                for item in store.list_items():
                    vector = store.vector(item.label, space)
                    found = store.items([item.label], space)[0]
                    digest = (
                        None if vector is None else hashlib.sha256(vector.tobytes()).hexdigest()
                    )
                    items[item.id] = [digest, found.origin if found else None, dict(item.metadata)]
                result[f"{path.parent.name}/{space}/{info.state}"] = items
    vault = (top / "data" / "vault").rglob("ab*.*")
    result["vault"] = sorted(path.name for path in vault)
    return result


def verify(top: Path) -> None:
    """After a crash: every acknowledged item is found, at distance 0, exactly once."""
    life = Life(top)
    try:
        acknowledged = (
            set((top / "acknowledged").read_text().split())
            if (top / "acknowledged").exists()
            else set[str]()
        )
        for hosted in life.gateway.galleries.all():
            for n in range(len(PIXELS)):
                found = life.gateway.searching.search(hosted, png(PIXELS[n]), 1000, None)
                names = [hit.item.id for hit in found.hits]
                check(len(names) == len(set(names)), "no item is doubled")
                check(acknowledged <= set(names), f"lost {acknowledged - set(names)}")
                if f"i{n}" in names:
                    check(names[0] == f"i{n}", "an item is nearest to itself")
                    check(found.hits[0].distance < 1e-4, "no vector meets another space's query")
    finally:
        life.close()


def clean(operation: Callable[[], object]) -> None:
    """Run in a child without a fault."""
    outcome = run_with_fault(None, operation)
    check(outcome.status == 0, outcome.error)


def sweep_operation(kind: str, top: Path, pristine: Path, name: str, stride: int) -> int:
    """Fail every step of one operation; the number of points."""
    operation = OPERATIONS[name]

    def restore() -> None:
        shutil.rmtree(top)
        shutil.copytree(pristine, top, symlinks=True)

    restore()
    clean(lambda: run(top, operation))
    expected = dump(top)
    points = 0
    for step, outcome in sweep(kind, lambda: run(top, operation), restore, stride=stride):
        points += 1
        where = f"{name}, {kind}@{step}"
        check(kind not in ("kill", "short") or outcome.status == KILLED, where)
        if name != "delete gallery":
            clean(lambda: verify(top))
        clean(lambda: run(top, operation))
        check(
            dump(top) == expected, f"{where}: the run after it ends otherwise than an unbroken one"
        )
    return points


def main(kinds: list[str], stride: int) -> dict[str, int]:
    # Trials of releases in this process: they write nothing, and a process costs a second.
    trial.explain_trial_failure_in_child = lambda request, poll: trial.explain_trial_failure(
        request
    )
    FAULT_INJECTOR.arm(None)
    points: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as disk, memory_folder(Path(disk)) as folder:
        top, pristine = folder / "top", folder / "pristine"
        top.mkdir()
        publish_block_release(top / "repo", 1)
        publish_block_release(top / "repo", 2, [1])
        (top / "data").mkdir()
        for name, operation in OPERATIONS.items():
            shutil.rmtree(pristine, ignore_errors=True)
            shutil.copytree(top, pristine, symlinks=True)
            for kind in kinds:
                points[f"{kind}: {name}"] = sweep_operation(kind, top, pristine, name, stride)
            shutil.rmtree(top)
            shutil.copytree(pristine, top, symlinks=True)
            clean(lambda chosen=operation: run(top, chosen))  # type: ignore[misc]
    return points


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[2:], int(sys.argv[1]))))
