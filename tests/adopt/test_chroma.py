"""Collections of Chroma on its server: the flip and its way back, what goes along, refusals."""

import os
import subprocess
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.rivals import chroma as program
from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.native_vectors import ColumnTexts, open_native_vectors
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.migrating import Migration, MigrationPlan
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Reversible, Target
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError
from nobackfill.plugins import chroma
from nobackfill.vectors import Vectors
from tests.adopt.copies import Chroma
from tests.adopt.models import text_model
from tests.adopt.stores import MADE

pytestmark = pytest.mark.scale
MAP = fit_maps(MADE.old, MADE.new)["affine"]
TARGET = Target("docs_new", MAP.dims[1], MAP.digest, model="new")
BOTH = {"docs", "docs_before"}


@pytest.fixture
def store(chroma_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Chroma]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Chroma(chroma_address, MADE)
    yield made
    made.close()


def source_of(store: Chroma, name: str = "docs") -> Reversible:
    source = store.open(name)
    assert isinstance(source, Reversible)
    return source


def names(store: Chroma) -> set[str]:
    return {one["name"] for one in store.asked("GET", "")}


def description(store: Chroma, name: str = "docs") -> dict[str, Any]:
    found: dict[str, Any] = store.asked("GET", f"/{name}")
    return found


def items(store: Chroma, name: str = "docs") -> dict[str, tuple[Any, ...]]:
    """Document, metadata and URI of each item, without what we record."""
    path = f"/{description(store, name)['id']}/get"
    answer = store.asked("POST", path, {"include": ["documents", "metadatas", "uris"]})
    parts = (answer["documents"], answer["metadatas"], answer["uris"])
    return {
        key: (document, {n: v for n, v in metadata.items() if n != "nobackfill_of"}, uri)
        for key, document, metadata, uri in zip(answer["ids"], *parts, strict=True)
    }


def vectors_of(store: Chroma, name: str = "docs") -> dict[str, Vectors]:
    rows = read_all(store.open(name))
    return dict(zip(rows.ids, rows.vectors, strict=True))


def check_mapped(store: Chroma) -> None:
    found = vectors_of(store)
    assert set(found) == set(MADE.ids)
    for name, vector in zip(MADE.ids, MAP(MADE.old), strict=True):
        np.testing.assert_allclose(found[name], vector, atol=1e-5)


def upsert(store: Chroma, path: str, name: str, vector: Vectors, **parts: object) -> None:
    body = {"ids": [name], "embeddings": [vector.tolist()], **parts}
    store.asked("POST", f"{path}/upsert", body)


def test_names_are_exchanged_and_given_back(store: Chroma) -> None:
    before, own = items(store), description(store)["id"]
    assert carry(store.open(), TARGET, MAP, flip=True).new_vector_count == 230
    assert names(store) == BOTH and description(store, "docs_before")["id"] == own
    assert items(store) == before
    check_mapped(store)
    with pytest.raises(InvalidInputError, match="of this map already"):
        store.open().open_target(Target("again", MAP.dims[1], MAP.digest))
    assert source_of(store).flip_state(MAP.digest) == "flipped"
    assert source_of(store).count_vectors("docs_new") == 230
    # After the flip an item changes, one comes and one goes.
    led = f"/{description(store)['id']}"
    upsert(store, led, MADE.ids[7], MADE.new[0])
    upsert(store, led, "new", MADE.new[1])
    store.asked("POST", f"{led}/delete", {"ids": [MADE.ids[8]]})
    with pytest.raises(InvalidInputError, match="2 items were written since the flip"):
        source_of(store).flip_back("docs_new")
    assert source_of(store).flip_back("docs_new", allow_loss=True) == 2
    assert names(store) == {"docs"} and description(store)["id"] == own
    found = vectors_of(store)
    assert set(found) == set(MADE.ids) - {MADE.ids[7], MADE.ids[8]}
    np.testing.assert_allclose(found[MADE.ids[3]], MADE.old[3], atol=1e-6)
    # A second migration begins anew.
    assert carry(store.open(), TARGET, MAP, flip=True).new_vector_count == 228
    source_of(store).drop_old()
    assert names(store) == {"docs"}
    assert source_of(store).flip_state(MAP.digest) == "finished"
    # And a third one, of the copy.
    third = Target("docs_new", MAP.dims[1], "0" * 64)
    second = fit_maps(MADE.new, MADE.old)["affine"]
    assert carry(store.open(), third, second, flip=True).new_vector_count == 228
    assert names(store) == BOTH
    assert source_of(store).flip_back("docs_new") == 0
    assert source_of(store).flip_state(MAP.digest) == "finished"


def test_without_a_flip_the_last_steps_exchange_the_names(store: Chroma) -> None:
    assert carry(store.open(), TARGET, MAP).next_steps[-2:] == [
        "client.get_collection('docs').modify(name='docs_before')",
        "client.get_collection('docs_new').modify(name='docs')",
    ]


def test_settings_and_metadata_go_along_but_no_embedding_function(store: Chroma) -> None:
    store.asked("DELETE", "/docs")
    index = {"space": "ip", "ef_search": 77, "max_neighbors": 9, "ef_construction": 55}
    function = {"type": "known", "name": "default", "config": {}}
    body = {
        "name": "docs", "metadata": {"owner": "me", "hnsw:space": "ip"},
        "configuration": {"hnsw": index, "embedding_function": function},
    }  # fmt: skip
    store.path = f"/{store.asked('POST', '', body)['id']}"
    old = description(store)
    assert old["configuration_json"]["embedding_function"] == function
    upsert(store, store.path, "one", MADE.old[0], uris=["u"], documents=["d"])
    # The owner changes the metadata while the new vectors are there.
    carry(store.open(), TARGET, MAP)
    store.asked("PUT", store.path, {"new_metadata": {"owner": "you"}})
    carry(store.open(), TARGET, MAP, flip=True)
    new = description(store)
    assert {k: new["configuration_json"]["hnsw"][k] for k in index} == index
    # Chroma's client refuses texts until it is given a function.
    assert new["configuration_json"]["embedding_function"] == {"type": "unknown"}
    owners = {n: v for n, v in new["metadata"].items() if not n.startswith("nobackfill_")}
    assert owners == {"owner": "you"}
    assert items(store)["one"][::2] == ("d", "u")
    assert description(store, "docs_before")["metadata"] == {"owner": "you"}
    assert source_of(store).flip_back("docs_new") == 0
    assert description(store)["configuration_json"]["embedding_function"] == function


CLIENT = """
import sys
import chromadb

class Mine(chromadb.EmbeddingFunction):
    def __init__(self): pass
    def __call__(self, input): return [[float(len(text))] * int(sys.argv[2]) for text in input]
    @staticmethod
    def name(): return "mine"
    def get_config(self): return {}
    @staticmethod
    def build_from_config(config): return Mine()

host, port = sys.argv[1].split(":")
client = chromadb.HttpClient(host=host, port=int(port))
if sys.argv[3] == "make":
    client.create_collection("docs", embedding_function=Mine()).add(ids=["a"], documents=["text"])
    sys.exit()
try:
    client.get_collection("docs").query(query_texts=["text"])
    sys.exit("the client embeds texts by a function that nobody named")
except ValueError as error:
    assert "unknown" in str(error), error
held = client.get_collection("docs", embedding_function=Mine())
assert held.query(query_texts=["text"])["documents"] == [["text"]]
"""


def test_chromas_client_embeds_no_text_by_the_old_function(store: Chroma) -> None:
    store.asked("DELETE", "/docs")

    def client(dim: int, action: str) -> None:
        python = program.PROGRAM.with_name("python")
        command = [python, "-c", CLIENT, store.address, str(dim), action]
        subprocess.run(list(map(str, command)), check=True)

    client(MAP.dims[0], "make")
    assert description(store)["configuration_json"]["embedding_function"]["name"] == "mine"
    carry(store.open(), TARGET, MAP, flip=True)
    client(MAP.dims[1], "search")


def test_a_program_that_holds_the_old_id_loses_nothing_unseen(
    store: Chroma, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = chroma.ChromaStore.redirect_name
    late = [*MADE.ids[:2], "late"]

    def led_meanwhile(self: chroma.ChromaStore, name: str, collection: str) -> None:
        write(self, name, collection)
        if collection == "docs_new":
            for row, item in enumerate(late):
                store.put(item, MADE.old[50 + row])
            store.delete(MADE.ids[9])
            # One that opens the name deletes an item of the new collection.
            path = f"/{description(store)['id']}/delete"
            store.asked("POST", path, {"ids": [MADE.ids[10]]})

    monkeypatch.setattr(chroma.ChromaStore, "redirect_name", led_meanwhile)
    carry(store.open(), TARGET, MAP, flip=True)
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    found = vectors_of(store)
    assert set(found) == {*MADE.ids, "late"} - {MADE.ids[9], MADE.ids[10]}
    for row, item in enumerate(late):
        np.testing.assert_allclose(found[item], MAP(MADE.old[50 + row][None])[0], atol=1e-5)
    # Items that it writes after the flip are found before the old collection is dropped.
    store.put("later", MADE.old[3])
    with pytest.raises(InvalidInputError, match="written 'docs_before' since the flip"):
        source_of(store).drop_old()
    with pytest.raises(InvalidInputError, match="hold the id of the old collection"):
        source_of(store).flip_back("docs_new")
    store.delete("later")
    source_of(store).drop_old()
    assert names(store) == {"docs"}


def test_a_read_meets_items_that_a_program_deletes(store: Chroma) -> None:
    """The server answers with the status 500 where an item goes while its vector is read."""
    stop = threading.Event()

    def delete_and_put() -> None:
        ids = MADE.ids[100:]
        body = {"ids": ids, "embeddings": MADE.old[100:].tolist()}
        while not stop.is_set():
            store.asked("POST", f"{store.path}/delete", {"ids": ids})
            store.asked("POST", f"{store.path}/upsert", body)

    with ThreadPoolExecutor(1) as pool:
        program = pool.submit(delete_and_put)
        try:
            for _ in range(100):
                assert set(MADE.ids[:100]) <= set(read_all(store.open()).ids)
        finally:
            stop.set()
        program.result()


def test_lists_in_metadata_end_with_their_collection(store: Chroma) -> None:
    """Chroma itself gives them to items that are written later: chroma-core/chroma#7594."""
    lists = {"ids": MADE.ids, "metadatas": [{"tags": ["a", "b"]}] * len(MADE.ids)}
    store.asked("POST", f"{store.path}/update", lists)
    before = items(store)
    carry(store.open(), TARGET, MAP, flip=True)
    assert items(store) == before
    assert source_of(store).flip_back("docs_new") == 0
    assert items(store) == before
    path = f"/{store.asked('POST', '', {'name': 'other'})['id']}"
    vectors = MADE.old.tolist()
    body = {"ids": MADE.ids, "embeddings": vectors, "metadatas": [{"n": 1}] * len(vectors)}
    store.asked("POST", f"{path}/upsert", body)
    assert {str(parts) for parts in items(store, "other").values()} == {"(None, {'n': 1}, None)"}


def test_a_finish_that_is_killed_while_items_go_is_completed(
    store: Chroma, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.asked(
        "POST", f"{store.path}/update", {"ids": MADE.ids[:9], "metadatas": [{"l": [1]}] * 9}
    )
    carry(store.open(), TARGET, MAP, flip=True)

    def kill(self: chroma.ChromaServer, name: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chroma.ChromaServer, "delete_collection", kill)
        source_of(store).drop_old()
    assert len(items(store, "docs_before")) == len(MADE.ids) - 9
    for lose in (False, True):
        with pytest.raises(InvalidInputError, match="`nobackfill migrate finish` was killed"):
            source_of(store).flip_back("docs_new", allow_loss=lose)
    source_of(store).drop_old()
    assert names(store) == {"docs"} and len(items(store)) == len(MADE.ids)


def killed(store: Chroma, after: int, action: str) -> bool:
    """Flip, or take it back, in a process that dies before its next change of a name or of facts;
    False if it came to its end."""
    if worker := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
        assert code in (0, 9)
        return code == 9
    change, calls = chroma.ChromaServer.rename_collection, list[int]()

    def dying(self: chroma.ChromaServer, *parts: Any) -> None:
        if len(calls) == after:
            os._exit(9)
        calls.append(1)
        change(self, *parts)

    try:
        chroma.ChromaServer.rename_collection = dying  # type: ignore[method-assign,assignment]
        source = source_of(store)
        with source.migration_lock():
            if action == "flip":
                carry(source, TARGET, MAP, flip=True)
            else:
                source.flip_back("docs_new")
        os._exit(0)
    finally:
        os._exit(1)


def test_an_item_without_a_document_is_named_with_a_way_out(store: Chroma, tmp_path: Path) -> None:
    source, model = store.open(), str(text_model(tmp_path / "m", 3))
    for name in MADE.ids[:2]:
        # An upsert alone would keep the document.
        store.delete(name)
        upsert(store, store.path, name, MADE.old[0])
    maker = open_native_vectors(source, ColumnTexts(source, "document"), model=model)
    target = maker.target("docs_new")
    with pytest.raises(InvalidInputError, match=r"2 items .* Correct or delete these items"):
        carry(source, target, maker, flip=True)
    assert names(store) == {"docs", "docs_new"}
    # An item without its vector is not possible in Chroma.
    upsert(store, store.path, MADE.ids[0], MADE.old[0], documents=["w1 w2"])
    store.delete(MADE.ids[1])
    maker = open_native_vectors(source, ColumnTexts(source, "document"), model=model)
    assert carry(source, target, maker, flip=True).new_vector_count == 229


def test_what_is_written_while_it_goes_back_is_not_lost(
    store: Chroma, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry(store.open(), TARGET, MAP, flip=True)
    lead, path, late = chroma.ChromaStore.redirect_name, f"/{description(store)['id']}", ["late"]
    # `back` deletes it from the old collection, too, which is no writing of programs.
    store.asked("POST", f"{path}/delete", {"ids": [MADE.ids[5]]})

    def led_late(self: chroma.ChromaStore, name: str, collection: str) -> None:
        lead(self, name, collection)
        # By a program that holds the id of the new collection.
        while late:
            upsert(store, path, late.pop(), MADE.new[1])

    monkeypatch.setattr(chroma.ChromaStore, "redirect_name", led_late)
    with pytest.raises(InvalidInputError, match="1 items were written while"):
        source_of(store).flip_back("docs_new")
    left = set(MADE.ids) - {MADE.ids[5]}
    assert names(store) == BOTH and set(vectors_of(store)) == left | {"late"}
    assert source_of(store).flip_state(MAP.digest) == "flipped"
    store.asked("POST", f"{path}/delete", {"ids": ["late"]})
    assert source_of(store).flip_back("docs_new") == 0 and names(store) == {"docs"}
    assert set(vectors_of(store)) == left


@pytest.mark.parametrize(("request_number", "is_done"), [(1, False), (1, True), (3, True)])
def test_a_back_that_is_killed_while_it_deletes_items_blames_no_program(
    store: Chroma, monkeypatch: pytest.MonkeyPatch, request_number: int, is_done: bool
) -> None:
    carry(store.open(), TARGET, MAP, flip=True)
    gone, left = MADE.ids[:120], set(MADE.ids[120:])
    store.asked("POST", f"/{description(store)['id']}/delete", {"ids": gone})
    monkeypatch.setattr(chroma, "_PAGE", 50)
    remove, calls = chroma.ChromaCollection.remove, list[int]()

    def killed(self: chroma.ChromaCollection, keys: Sequence[Any]) -> None:
        calls.append(len(keys))
        if is_done or len(calls) < request_number:
            remove(self, keys)
        if len(calls) == request_number:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chroma.ChromaCollection, "remove", killed)
        source_of(store).flip_back("docs_new")
    assert names(store) == BOTH
    # Items that a program writes are still found.
    store.put("late", MADE.old[3])
    with pytest.raises(InvalidInputError, match="hold the id of the old collection"):
        source_of(store).flip_back("docs_new")
    store.delete("late")
    assert source_of(store).flip_back("docs_new") == 0
    assert names(store) == {"docs"} and set(vectors_of(store)) == left


@pytest.mark.parametrize("action", ["flip", "back"])
def test_an_exchange_that_is_killed_anywhere_continues_or_is_undone(
    store: Chroma, action: str
) -> None:
    own = description(store)["id"]
    carry(store.open(), TARGET, MAP)
    for after in range(20):
        if action == "back":
            carry(store.open(), TARGET, MAP, flip=True)
        more = killed(store, after, action)
        # Whoever holds the id goes on.
        store.put(MADE.ids[after], MADE.old[after])
        source = source_of(store)
        with source.migration_lock():
            if source.flip_state(MAP.digest) == "flipped":
                assert source.flip_back("docs_new", allow_loss=True) == 0
            elif after % 2:
                assert carry(source_of(store), TARGET, MAP, flip=True).new_vector_count == 230
                check_mapped(store)
                assert source_of(store).flip_back("docs_new") == 0
            else:
                source.drop_new_vectors("docs_new")
        assert names(store) - {"docs_new"} == {"docs"} and description(store)["id"] == own
        assert set(vectors_of(store)) == set(MADE.ids)
        carry(store.open(), TARGET, MAP)
        if not more:
            break
    assert after >= 4 and not more


def test_a_name_in_use_is_told_before_anything_is_embedded(store: Chroma, tmp_path: Path) -> None:
    model = str(text_model(tmp_path / "m", 3))
    address = f"chroma:http://{store.address}#docs"
    request = MigrationPlan(address, model, text_column="document", sample_size=100)
    migration, lines = Migration(tmp_path / "work"), list[str]()
    store.asked("POST", "", {"name": "docs_new"})
    upsert(store, f"/{description(store, 'docs_new')['id']}", "foreign", MADE.new[0])
    assert source_of(store).count_vectors("docs_new") == 0
    with pytest.raises(AlreadyExistsError, match="a collection 'docs_new', but another one"):
        migration.decide(request, lines.append)
    store.asked("DELETE", "/docs_new")
    store.asked("POST", "", {"name": "docs_before"})
    with pytest.raises(InvalidInputError, match="'docs_before' exists already"):
        migration.decide(request, lines.append)
    assert not lines
    store.asked("DELETE", "/docs_before")
    migration.decide(request, lines.append)
    assert lines and migration.status().migrated_rows == 0
    carry(store.open(), TARGET, MAP, flip=True)
    with pytest.raises(InvalidInputError, match="'docs_before' is left over from an earlier flip"):
        Migration(tmp_path / "other").decide(request, lines.append)


def test_names_in_use_are_refused(store: Chroma) -> None:
    store.asked("POST", "", {"name": "docs_before"})
    with pytest.raises(InvalidInputError, match="'docs_before' exists already"):
        carry(store.open(), TARGET, MAP, flip=True)
    assert names(store) == BOTH
    store.asked("DELETE", "/docs_before")
    store.asked("POST", "", {"name": "docs_new"})
    with pytest.raises(AlreadyExistsError, match="no copy of 'docs', so rename or delete it"):
        carry(store.open(), TARGET, MAP, flip=True)
    store.asked("DELETE", "/docs_new")
    # Between the two requests, a program creates a collection of the free name.
    for after in range(20):
        killed(store, after, "flip")
        if "docs" not in names(store):
            break
    assert names(store) == {"docs_before", "docs_new"}
    assert source_of(store).count() == 230
    store.asked("POST", "", {"name": "docs"})
    with pytest.raises(AlreadyExistsError, match="a program created a collection of this name"):
        store.open()
    store.asked("DELETE", "/docs")
    assert carry(store.open(), TARGET, MAP, flip=True).new_vector_count == 230
    check_mapped(store)
    with pytest.raises(NotFoundError):
        open_source(f"chroma:http://{store.address}#nowhere")
