"""The alias of a collection of Milvus flips to its copy and back; on real engines, by
`make test-scale`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.migrating import Migration, MigrationPlan, State
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.flipping import FlippingSource
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Flippable, Target, Window
from nobackfill.errors import BusyError, InvalidInputError, NotFoundError, PreconditionError
from nobackfill.vectors import Vectors
from tests.adopt.copies import Milvus
from tests.adopt.stores import MADE, opened

MAP = fit_maps(MADE.old, MADE.new)["affine"]
TARGET = Target("docs_new", MAP.dims[1], MAP.digest, model="new", must_be_reversible=True)
pytestmark = pytest.mark.scale


@pytest.fixture(params=["milvus-lite", "milvus"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Milvus]:
    with opened(request.param, request, tmp_path / "store") as found:
        assert isinstance(found, Milvus)
        found.client.create_alias("docs", "live")
        yield found


def live(store: Milvus, name: str = "live", vector: str | None = None) -> FlippingSource:
    source = open_source(f"milvus:{store.place}#{name}", vector=vector)
    assert isinstance(source, FlippingSource)
    return source


def vectors_of(source: FlippingSource) -> dict[str, Vectors]:
    rows = read_all(source)
    return dict(zip(rows.ids, rows.vectors, strict=True))


def led_to(store: Milvus) -> str:
    return str(store.client.describe_collection("live")["collection_name"])


def mapped(vector: Vectors) -> Vectors:
    row: Vectors = MAP(vector[None])[0]
    return row


def test_an_alias_flips_and_goes_back(store: Milvus) -> None:
    done = carry(live(store), TARGET, MAP, flip=True, rows_per_window=100)
    assert done.new_vector_count == 230 and led_to(store) == "docs_new"
    assert "programs that open 'docs' by its own name" in done.next_steps[0]
    source = live(store)
    assert (source.flip_state(MAP.digest), source.facts().model) == ("flipped", "new")
    assert source.flip_state("other") == "unknown"
    with pytest.raises(InvalidInputError, match="of this map already"):
        source.open_target(TARGET)
    (left,) = source.flip_obstacles(TARGET)
    assert "'docs' is left over from an earlier flip" in left
    # Since the flip one item changes, one comes and one goes.
    store.put_new(MADE.ids[7], MADE.new[0], "live")
    store.put_new("new", MADE.new[1], "live")
    store.client.delete("live", ids=[MADE.ids[8]])
    with pytest.raises(InvalidInputError, match="2 items were written since the flip"):
        live(store).flip_back("docs_new")
    assert led_to(store) == "docs_new"
    assert live(store).flip_back("docs_new", allow_loss=True) == 2
    assert store.client.list_collections() == ["docs"] and led_to(store) == "docs"
    found = vectors_of(live(store))
    assert set(found) == set(MADE.ids) - {MADE.ids[7], MADE.ids[8]}
    np.testing.assert_array_equal(found[MADE.ids[3]], MADE.old[3])
    with pytest.raises(NotFoundError, match="no flip to 'docs_new' that can be undone"):
        live(store).flip_back("docs_new")


def test_what_is_written_while_it_goes_back_is_not_lost(
    store: Milvus, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nobackfill.plugins.milvus.source import MilvusStore

    carry(live(store), TARGET, MAP, flip=True)
    lead, late = MilvusStore.redirect_name, ["late"]

    def led_late(self: MilvusStore, name: str, collection: str) -> None:
        while late:
            store.put_new(late.pop(), MADE.new[1], "live")
        lead(self, name, collection)

    monkeypatch.setattr(MilvusStore, "redirect_name", led_late)
    with pytest.raises(InvalidInputError, match="1 items were written while"):
        live(store).flip_back("docs_new")
    assert led_to(store) == "docs_new" and len(vectors_of(live(store))) == 231
    assert live(store).flip_state(MAP.digest) == "flipped"
    store.client.delete("live", ids=["late"])
    assert live(store).flip_back("docs_new") == 0 and led_to(store) == "docs"


@pytest.mark.parametrize("state", ["writing", "flipped"])
def test_back_does_not_claim_to_undo_what_a_moved_alias_hides(
    store: Milvus, tmp_path: Path, state: State
) -> None:
    carry(live(store), TARGET, MAP, flip=True)
    migration = Migration(tmp_path)
    source = f"milvus:{store.place}#live"
    plan = MigrationPlan(
        source, "new", new_column="docs_new", state=state, computer_digest=MAP.digest
    )
    values = TypeAdapter(MigrationPlan).dump_python(plan, by_alias=True)
    (tmp_path / "migration.json").write_text(json.dumps(values))
    store.client.create_collection("other", dimension=24)
    store.client.alter_alias("other", "live")
    for command in (migration.undo, migration.finish, migration.status):
        with pytest.raises(
            PreconditionError, match="this name leads to the collection 'other' now"
        ) as refusal:
            command()
        for collection in ("docs_new", "docs"):
            assert f"client.alter_alias('{collection}', 'live')" in str(refusal.value)
    assert migration.plan().state == state
    store.client.alter_alias("docs_new", "live")
    assert migration.vector_names() == ("docs_new", "docs")
    assert migration.undo() == 0
    assert migration.plan().state == "taken back" and led_to(store) == "docs"
    assert set(store.client.list_collections()) == {"docs", "other"}


def test_the_old_collection_is_dropped_and_the_next_migration_begins(store: Milvus) -> None:
    carry(live(store), TARGET, MAP, flip=True)
    store.client.create_alias("docs", "other")
    with pytest.raises(InvalidInputError, match="while the alias other leads to it"):
        live(store).drop_old()
    store.client.drop_alias("other")
    live(store).drop_old()
    assert store.client.list_collections() == ["docs_new"]
    assert live(store).flip_state(MAP.digest) == "finished"
    # A later collection of that name is no old one.
    store.client.create_collection("docs", dimension=3)
    assert live(store).flip_state(MAP.digest) == "finished" and not live(store).flip_obstacles(
        TARGET
    )
    again = fit_maps(MADE.new, MADE.old)["affine"]
    target = Target("docs_new_new", 24, again.digest, must_be_reversible=True)
    assert carry(live(store), target, again, flip=True).new_vector_count == 230
    assert led_to(store) == "docs_new_new" and live(store).facts().dim == 24
    assert live(store).flip_back("docs_new_new") == 0 and led_to(store) == "docs_new"


def test_what_others_write_while_it_flips_is_found(store: Milvus) -> None:
    source = live(store)
    carry(source, TARGET, MAP)
    place = source.open_target(TARGET)
    assert isinstance(place, Flippable)
    names = MADE.ids
    with place.open_flip():
        # Some programs still have the old collection, others the new one.
        store.put("late", MADE.old[5])
        store.put(names[0], MADE.old[6])
        store.delete(names[1])
        store.put_new(names[2], MADE.new[9], "live")
        store.client.delete("live", ids=[names[3]])
        store.put(names[4], MADE.old[7])
        store.put_new(names[4], MADE.new[10], "live")
        rows = place.pending(Window())
        assert set(rows.ids) == {"late", names[0]}
        # Put by a program between the read and the write.
        store.put_new("late", MADE.new[11], "live")
        place.write(rows, MAP(rows.vectors))
        assert not len(place.pending(Window()))
    found = vectors_of(live(store))
    assert set(found) == {*names, "late"} - {names[1], names[3]}
    expected = {
        "late": MADE.new[11], names[0]: mapped(MADE.old[6]), names[2]: MADE.new[9],
        names[4]: MADE.new[10], names[5]: mapped(MADE.old[5]),
    }  # fmt: skip
    for name, vector in expected.items():
        np.testing.assert_allclose(found[name], vector, atol=1e-5)


def test_a_failed_flip_leads_to_the_old_collection_again(store: Milvus) -> None:
    source = live(store)
    carry(source, TARGET, MAP)
    place = source.open_target(TARGET)
    assert isinstance(place, Flippable)
    with pytest.raises(KeyboardInterrupt), place.open_flip():
        assert led_to(store) == "docs_new"
        raise KeyboardInterrupt
    assert led_to(store) == "docs" and not place.flipped
    assert live(store).facts().dim == 24


def test_a_killed_flip_continues_or_goes_back(store: Milvus) -> None:
    def kill_in_flip() -> None:
        """Leave what a process leaves that is killed in the block of a flip."""
        carry(live(store), TARGET, MAP)
        store.client.alter_collection_properties("docs_new", {"nobackfill.flip": "begun"})
        store.client.alter_alias("docs_new", "live")

    kill_in_flip()
    # The alias leads to the copy, but the source is the original still.
    assert led_to(store) == "docs_new"
    source = live(store)
    assert (source.facts().dim, source.flip_state(MAP.digest)) == (24, "old")
    assert source.read_migration_digest("docs_new") == MAP.digest
    assert source.drop_new_vectors("docs_new")
    assert led_to(store) == "docs" and store.client.list_collections() == ["docs"]
    kill_in_flip()
    store.put("late", MADE.old[5])
    store.put_new(MADE.ids[2], MADE.new[9], "live")
    with pytest.raises(InvalidInputError, match="programs have written items since"):
        live(store).drop_new_vectors("docs_new")
    assert carry(live(store), TARGET, MAP, flip=True).new_vector_count == 231
    found = vectors_of(live(store))
    np.testing.assert_allclose(found["late"], mapped(MADE.old[5]), atol=1e-5)
    np.testing.assert_allclose(found[MADE.ids[2]], MADE.new[9], atol=1e-5)


def test_a_copy_that_a_killed_run_has_half_made_is_completed(store: Milvus) -> None:
    source = live(store)
    source.open_target(TARGET)
    store.client.release_collection("docs_new")
    store.client.drop_index("docs_new", "vector")
    assert live(store).count_vectors("docs_new") == 0
    assert carry(live(store), TARGET, MAP, flip=True).new_vector_count == 230
    assert store.client.list_indexes("docs_new") == store.client.list_indexes("docs")


def test_what_cannot_flip_is_refused_by_name(store: Milvus) -> None:
    from pymilvus import DataType

    with pytest.raises(InvalidInputError, match="name its alias, as in #live"):
        _ = live(store, "docs").flip_name
    with pytest.raises(InvalidInputError, match="name its alias, as in #live"):
        carry(live(store, "docs"), TARGET, MAP, flip=True)
    assert store.client.list_collections() == ["docs"]
    store.client.drop_alias("live")
    with pytest.raises(InvalidInputError, match=r"client.create_alias\('docs', 'docs_live'\)"):
        _ = live(store, "docs").flip_name
    schema = store.client.create_schema(auto_id=True, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=24)
    index = store.client.prepare_index_params()
    index.add_index("v", index_type="FLAT", metric_type="COSINE")
    store.client.create_collection("numbered", schema=schema, index_params=index)
    store.client.create_alias("numbered", "live")
    with pytest.raises(
        InvalidInputError, match=r"Milvus generates the keys of this collection \(auto_id\)"
    ):
        _ = live(store).flip_name


def test_a_whole_collection_comes_along(store: Milvus) -> None:
    from pymilvus import DataType

    # Milvus 2.3 has one field of vectors, and neither nulls nor defaults.
    lite, client = "://" not in store.place, store.client
    null = {"nullable": True} if lite else {}
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True, description="about")
    schema.add_field("id", DataType.VARCHAR, is_primary=True, max_length=64, description="its key")
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=24)
    scalars = ("BOOL", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE", "JSON")
    for kind in scalars:
        schema.add_field(kind, DataType[kind], **null)
    default = {"default_value": "a default"} if lite else {}
    schema.add_field("text", DataType.VARCHAR, max_length=99, **default)
    for kind in ("INT64", "FLOAT", "VARCHAR"):
        schema.add_field(
            f"list_{kind}", DataType.ARRAY, element_type=DataType[kind], max_capacity=5,
            max_length=20,
        )  # fmt: skip
    index = client.prepare_index_params()
    index.add_index(
        "v", index_name="of_v", index_type="HNSW", metric_type="IP",
        params={"M": 7, "efConstruction": 50},
    )  # fmt: skip
    index.add_index("text", index_name="of_text", index_type="INVERTED" if lite else "Trie")
    if lite:
        schema.add_field("other", DataType.FLOAT_VECTOR, dim=3)
        schema.add_field("sparse", DataType.SPARSE_FLOAT_VECTOR)
        index.add_index("other", index_type="FLAT", metric_type="L2")
        index.add_index("sparse", index_type="SPARSE_INVERTED_INDEX", metric_type="IP")
    client.create_collection(
        "rich", schema=schema, index_params=index, consistency_level="Eventually", num_shards=2
    )
    client.create_alias("rich", "whole")
    rows = []
    for number, (name, vector) in enumerate(zip(MADE.ids, MADE.old, strict=True)):
        row = {
            "id": name, "v": vector, "BOOL": True, "INT8": -number // 2, "INT16": number,
            "INT32": -number, "INT64": number * 10**15, "FLOAT": number / 10, "DOUBLE": number / 10,
            "JSON": {"a": number / 10, "b": [1, None, "ü"]}, "text": f"text {number}",
            "list_INT64": [number], "list_FLOAT": [number / 10], "list_VARCHAR": ["a", "ü"],
            "undeclared": {"x": number / 10},
        }  # fmt: skip
        if lite:
            row |= {"other": [number / 10, 1, 2], "sparse": {1: number / 10 + 1, 70_000: 0.3}}
            if number % 3 == 0:
                row |= dict.fromkeys(scalars)
                del row["text"]
        rows.append(row)
    client.upsert("rich", rows)
    target = Target("rich_new", MAP.dims[1], MAP.digest, must_be_reversible=True)
    carry(live(store, "whole", "v"), target, MAP, flip=True)
    assert _described(client, "rich") == _described(client, "rich_new")
    assert _items(client, "rich") == _items(client, "rich_new")
    assert live(store, "whole", "v").flip_back("rich_new") == 0


def _described(client: Any, name: str) -> object:
    facts = client.describe_collection(name)
    for field in facts["fields"]:
        field["params"] = {key: one for key, one in field["params"].items() if key != "dim"}
    indexes = [client.describe_index(name, one) for one in sorted(client.list_indexes(name))]
    parts = ("description", "num_shards", "consistency_level", "num_partitions")
    settings = ("index_name", "index_type", "M", "efConstruction", "params")
    return (
        str(facts["fields"]),
        [facts[part] for part in parts],
        [{setting: one.get(setting) for setting in settings} for one in indexes],
    )


def _items(client: Any, name: str) -> dict[str, str]:
    fields = {"v", "nobackfill_of"}
    return {
        one["id"]: repr(sorted((n, value) for n, value in one.items() if n not in fields))
        for one in client.query(
            name, filter='id >= ""', output_fields=["*"], consistency_level="Strong"
        )
    }


@pytest.mark.parametrize("store", ["milvus-lite"], indirect=True)
def test_a_part_of_an_item_that_is_written_since_the_flip_counts(store: Milvus) -> None:
    """An upsert of some fields leaves what we note in the item; Milvus 2.3 has none."""
    carry(live(store), TARGET, MAP, flip=True)
    for row in ({"id": MADE.ids[0], "text": "changed"}, {"id": MADE.ids[1], "vector": MADE.new[9]}):
        store.client.upsert("live", [row], partial_update=True)
    with pytest.raises(InvalidInputError, match="2 items were written since the flip"):
        live(store).flip_back("docs_new")


@pytest.mark.parametrize("store", ["milvus-lite"], indirect=True)
def test_a_file_that_another_process_has_opened_is_busy(store: Milvus) -> None:
    code = (
        "import sys; from nobackfill.adopt.sources.opening import open_source\n"
        "try: open_source(sys.argv[1])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    command = [sys.executable, "-c", code, f"milvus:{store.place}#live"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.startswith(BusyError.__name__) and "another process" in done.stdout
    assert not done.stderr
