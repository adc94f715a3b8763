"""Operations on the device: add, remove, search, sync, go back, be killed half-way."""

import copy
from collections.abc import Callable

from nobackfill.client.maintenance import collect_garbage as collect
from nobackfill.client.maintenance import remove, verify
from nobackfill.client.output import Output
from nobackfill.client.photos import add, item_id
from nobackfill.client.search import Search
from nobackfill.client.sync import SyncOptions, SyncReport, roll_back, sync
from nobackfill.digests import sha256_file
from nobackfill.errors import NotFoundError
from tests.lives.life import Life
from tests.lives.pictures import IMAGES, judge
from tests.support import edge

QUIET = Output()
KILLED = -9
# A sync takes about so many durable steps.
STEPS = 60


def make(life: Life) -> None:
    """An empty gallery that follows the publication."""
    edge.make_device(life.world.repo, life.world.device)


def add_images(life: Life) -> None:
    """Some that are new, some that are held; a batch at most."""
    pictures = sorted({life.below(IMAGES) for _ in range(1 + life.below(8))})
    with life.world.opened() as device:
        files = [life.world.file(picture) for picture in pictures]
        added = add(device, files, {}, lambda done, total: None)
    assert len(added.added_names) == len(set(pictures) - life.device.pictures), f"{added}"
    assert not added.refusals
    life.device.pictures |= set(pictures)


def remove_images(life: Life) -> None:
    """One that is there; one that is not is refused."""
    picture = life.below(IMAGES)
    if life.device.pictures and life.chance(0.7):
        picture = life.one_of(sorted(life.device.pictures))
    with life.world.opened() as device:
        try:
            remove(device, [_id(life, picture)])
            gone = True
        except NotFoundError:
            gone = False
    assert gone == (picture in life.device.pictures)
    life.device.pictures.discard(picture)


def search(life: Life) -> None:
    """By an image file, exactly."""
    picture, k = life.below(IMAGES), life.one_of([1, 10, 1000])
    with life.world.opened() as device:
        answer = Search(device, {}).by_images([life.world.file(picture)], k)[0]
    assert answer.release == life.device.active, f"{answer.release}, not {life.device.active}"
    hits = [(hit.id, hit.distance) for hit in answer.hits]
    assert {hit.release for hit in answer.hits} <= {life.device.active}
    places = {_id(life, held): held for held in life.device.pictures}
    judge(hits, places, life.world.pictures, picture, k, exact=True)


def sync_now(life: Life) -> None:
    """From the folder or through the gateway."""
    grpc = life.chance(0.3)
    if grpc:
        life.world.refresh()
    source = f"grpc://{life.world.served.address}" if grpc else str(life.world.repo)
    retry = life.chance(0.2)
    report = follow(life, source, retry=retry)
    assert report.state == check_sync(life, life.device.sync(retry=retry)), f"{report}"


def follow(life: Life, source: str, *, retry: bool = False) -> SyncReport:
    """One sync in this process."""
    with life.world.opened() as device:
        return sync(device, SyncOptions(source=source, retry=retry), QUIET)


def check_sync(life: Life, state: str) -> str:
    """After a sync: the device is where the model is, and has seen all that is published."""
    assert observed(life) == _expected(life), f"{observed(life)}, must be {_expected(life)}"
    assert floor(life) == life.world.versions()
    return state


def go_back(life: Life) -> None:
    """`rollback`, refused where the way back is gone."""
    with life.world.opened() as device:
        try:
            roll_back(device)
            went = True
        except NotFoundError:
            went = False
    assert went == (life.device.back is not None)
    if went:
        life.device.rollback()
    assert observed(life) == _expected(life)


def collect_garbage(life: Life) -> None:
    """`gc` confirms the release."""
    with life.world.opened() as device:
        collect(device)
    life.device.back = None
    assert observed(life) == _expected(life)


def check(life: Life) -> None:
    """`verify` has nothing to say, and every item is there."""
    with life.world.opened() as device:
        told = verify(device)
    assert not told["problems"], f"{told}"
    assert told["items"] == len(life.device.pictures)
    assert observed(life) == _expected(life)


def killed(life: Life) -> None:
    """A command dies at one of its durable steps: all old or all new, and the next one works."""
    before = copy.deepcopy(vars(life.device) | {"publication": None})
    pictures = sorted({life.below(IMAGES) for _ in range(4)})
    files = [str(life.world.file(picture)) for picture in pictures]
    source = str(life.world.repo)
    ways: list[tuple[tuple[str, ...], Callable[[], object]]] = [
        (("sync", "--from", source), life.device.sync),
        (("sync", "--from", source, "--retry"), lambda: life.device.sync(retry=True)),
        (("add", *files), lambda: life.device.pictures.update(pictures)),
    ]
    if life.device.back is not None:
        ways.append((("rollback",), life.device.rollback))
    arguments, then = life.one_of(ways)
    status = life.world.command(*arguments, fault=f"kill@{1 + life.below(STEPS)}")
    assert status in (0, KILLED), f"{arguments} ended with {status}"
    was = _expected(life)
    then()
    found, wanted = observed(life), _expected(life)
    if status == KILLED and found != wanted:
        if "--retry" in arguments and found == (*was[:3], frozenset()):
            was = found
            before["held"] = set()
        assert found == was, f"{arguments}: {found}, must be {was} or {wanted}"
        del before["publication"]
        vars(life.device).update(before)
    else:
        assert found == wanted, f"{arguments}: {found}, must be {wanted}"
    check(life)


Observed = tuple[int, int | None, frozenset[str], frozenset[int]]


def observed(life: Life) -> Observed:
    """The device's release, the way back, its items, what it holds back. The floor never sinks."""
    with life.world.opened() as device:
        back = device.previous_space()
        labels, _ = device.store.load_vectors(device.store.active().spec.space)
        items = device.store.items(labels)
        held = frozenset(int(n) for n in device.state("held_back", {}))
        found = frozenset(item.id for item in items if item is not None)
        assert len(found) == len(labels), "an item twice"
        returns_to = None if back is None else back.spec.release
        result = device.store.active().spec.release, returns_to, found, held
    now = floor(life)
    assert all(new >= old for new, old in zip(now, life.floor, strict=True)), f"{life.floor}, {now}"
    life.floor = now
    return result


def floor(life: Life) -> tuple[int, int, int, int]:
    """The newest metadata versions the device has seen: root, timestamp, snapshot, targets."""
    with life.world.opened() as device:
        kept = device.state("floor")
    return kept["root"], kept["timestamp"], kept["snapshot"], kept["targets"]


def _expected(life: Life) -> Observed:
    device = life.device
    items = frozenset(_id(life, picture) for picture in device.pictures)
    return device.active, device.back, items, frozenset(device.held)


def _id(life: Life, picture: int) -> str:
    return item_id(sha256_file(life.world.file(picture)))
