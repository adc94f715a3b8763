"""Operations on the gateway's items: put, delete, look, search."""

from nobackfill.errors import PreconditionError
from nobackfill.v1 import gallery_pb2, types_pb2
from tests.lives.life import Life
from tests.lives.model import Gallery, Item
from tests.lives.pictures import IMAGES, PICTURES, judge
from tests.lives.world import KilledError, Query, spaces_of

NAMES = 150
BIG = "big"
BIG_ITEMS = 2_300
# Galleries of more vectors than this may be searched by a graph.
EXACT = 1_000


def fill(life: Life) -> None:
    """Make the galleries a life begins with: two small ones, and one that gets a graph."""
    world = life.world
    for name in ("a", "b", BIG):
        world.client.create_gallery(name)
        life.server.create(name)
    gallery = life.server.galleries[BIG]
    for first in range(0, BIG_ITEMS, 500):
        items = []
        for picture in range(IMAGES + first, IMAGES + min(first + 500, BIG_ITEMS)):
            content = f"vectors {picture} of 1"
            items.append(world.vectors(f"v{picture}", picture, 1, content))
            gallery.put(f"v{picture}", Item(content, picture, frozenset({1})))
        assert not world.client.put_items(BIG, items)


def put(life: Life) -> None:
    """Images and bare vectors, some of them under names that are taken."""
    name = life.some_gallery()
    gallery = life.server.galleries[name]
    messages, wanted, refused = [], dict[str, Item](), set[str]()
    for item_name in {f"i{life.below(NAMES)}" for _ in range(1 + life.below(6))}:
        if life.chance(0.7):
            picture = life.below(IMAGES)
            content = f"image {picture}"
            item = Item(content, picture, frozenset(life.server.kept(gallery)))
            messages.append(life.world.image(item_name, picture, content))
        else:
            picture = life.below(PICTURES)
            release = life.one_of(sorted(life.publication.sources))
            content = f"vectors {picture} of {release}"
            message = life.world.vectors(item_name, picture, release, content)
            where = life.server.bare(gallery, release)
            messages.append(message)
            if where is None:
                refused.add(item_name)
                continue
            item = Item(content, picture, where)
        wanted[item_name] = item
    before = {item_name: gallery.items.get(item_name) for item_name in wanted}
    for item_name, item in wanted.items():
        gallery.put(item_name, item)
    try:
        answer = life.world.ask(lambda client: client.put_items(name, messages))
    except KilledError:
        settle(life, name, before)
    else:
        assert answer.keys() == refused, f"{answer}, not {refused}"


def put_nonsense(life: Life) -> None:
    """What must be refused, and change nothing: a search afterwards would tell."""
    name = life.some_gallery()
    release = life.server.galleries[name].active
    good = life.world.embedding(release, 0)
    values = {
        "short": good.values[:-4],
        "infinite": b"\0\0\x80\x7f" + good.values[4:],
        "nothing": bytes(len(good.values)),
    }
    items = [
        gallery_pb2.PutItem(
            id=f"i{life.below(NAMES)}",
            vectors=gallery_pb2.Vectors(
                embedding=types_pb2.Embedding(space=good.space, values=wrong)
            ),
        )
        for wrong in values.values()
    ]
    items.append(gallery_pb2.PutItem(id="no image", image=b"GIF89a" + bytes(20)))
    try:
        # Of two errors of one id Gateway tells the last.
        answer = life.world.ask(lambda client: client.raw.put(items, name))
    except KilledError:
        return
    assert (answer.stored, len(answer.errors)) == (0, 4), f"{answer}"


def delete(life: Life) -> None:
    """Some that are there, some that are not."""
    name = life.some_gallery()
    gallery = life.server.galleries[name]
    there = sorted(gallery.items)
    names = {f"i{life.below(NAMES)}" for _ in range(2)}
    names |= {life.one_of(there) for _ in range(life.below(4)) if there}
    before = {item: gallery.items.pop(item, None) for item in sorted(names)}
    try:
        deleted = life.world.ask(lambda client: client.delete(name, sorted(names)))
    except KilledError:
        settle(life, name, before)
    else:
        assert deleted == sum(item is not None for item in before.values())


def settle(life: Life, name: str, before: dict[str, Item | None]) -> None:
    """After a kill each item is as it was or as it was to be, and the model as it is."""
    gallery = life.server.galleries[name]
    for item_name, old in before.items():
        new, found = gallery.items.get(item_name), life.world.item(name, item_name)
        known = {(i.content, i.releases): i for i in (old, new) if i is not None}
        if found is None:
            assert old is None or new is None, f"{item_name} is gone: was {old}, is to be {new}"
            gallery.items.pop(item_name, None)
        else:
            assert found in known, f"{item_name} is {found}: was {old}, is to be {new}"
            gallery.items[item_name] = known[found]


def look(life: Life) -> None:
    """One item: its content, and exactly the spaces it must be in."""
    name = life.some_gallery()
    items = life.server.galleries[name].items
    item_name = life.one_of(sorted({*items, "i0"}))
    found, item = life.world.item(name, item_name), items.get(item_name)
    wanted = None if item is None else (item.content, item.releases)
    assert found == wanted, f"{item_name} of {name} is {found}, must be {wanted}"


def count(life: Life) -> None:
    """Every gallery: its number of items, its spaces, and how many vectors each holds."""
    found = life.world.galleries()
    assert found.keys() == life.server.galleries.keys()
    for name, gallery in life.server.galleries.items():
        told = found[name]
        assert told.items == len(gallery.items), f"{name}: {told.items} of {len(gallery.items)}"
        assert told.release == life.server.parts(gallery)[0], f"{name}: {told}"
        spaces = spaces_of(told)
        wanted = {
            n: (state, len(gallery.items) - gallery.lacking(n))
            for n, state in gallery.states.items()
        }
        assert spaces == wanted, f"{name}: {spaces}, must be {wanted}"


def search_image(life: Life) -> None:
    """By an image: every item that the gallery's plan shows."""
    name = life.some_gallery()
    picture = life.below(IMAGES)
    query = life.world.by_image(picture)
    _search(life, name, query, picture, life.server.parts(life.server.galleries[name]))


def search_vectors(life: Life) -> None:
    """By what clients of any release have on board; refused where no space fits."""
    name, server = life.some_gallery(), life.server
    gallery = server.galleries[name]
    parts, published = server.parts(gallery), sorted(life.publication.sources)
    brought = parts if life.chance(0.5) else (life.one_of(published),)
    there = sorted(gallery.items)
    picture = life.below(PICTURES)
    if there and life.chance(0.8):
        picture = gallery.items[life.one_of(there)].picture
    query = life.world.by_embedding(picture, brought)
    release, staged = brought[0], server.staged(gallery)
    if all(_queried(life, gallery, part) in brought for part in parts):
        _search(life, name, query, picture, parts)
    elif release in server.kept(gallery) and release != staged:
        _search(life, name, query, picture, (release,))
    elif release == parts[0]:
        _refused(life, name, query)
    elif release in life.publication.directly and release - 1 == gallery.active:
        _search(life, name, query, picture, (gallery.active,), release)
    else:
        _refused(life, name, query)


def _queried(life: Life, gallery: Gallery, part: int) -> int:
    """The release whose queries search a part."""
    return life.server.parts(gallery)[0] if gallery.rollout == "direct" else part


def _refused(life: Life, name: str, query: Query) -> None:
    try:
        answer = life.world.read(lambda client: client.search(name, **query, k=5))
    except PreconditionError:
        return
    raise AssertionError(f"answered across spaces: {answer}")


def _search(
    life: Life,
    name: str,
    query: Query,
    picture: int,
    parts: tuple[int, ...],
    by: int | None = None,
) -> None:
    gallery = life.server.galleries[name]
    k = life.one_of([1, 5, 10, 60, 1000])
    answer = life.world.read(lambda client: client.search(name, **query, k=k))
    assert answer.release == (by or parts[0]), f"{answer.release} answers, not {by or parts[0]}"
    shown = {n: i for n, i in gallery.items.items() if i.releases & set(parts)}
    places = {n: item.picture for n, item in shown.items()}
    hits = [(hit.id, hit.distance) for hit in answer.hits]
    judge(hits, places, life.world.pictures, picture, k, exact=len(shown) < EXACT)
    for hit in answer.hits:
        item = shown[hit.id]
        of = next(part for part in parts if part in item.releases)
        assert hit.release == of, f"{hit.id} of {hit.release}, not {of}"
        assert hit.metadata["content"] == item.content
