"""Tables of LanceDB and of sqlite-vec: the flip and its way back, what goes along, and refusals."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import apsw
import lancedb
import numpy as np
import pyarrow as pa
import pytest
import sqlite_vec
from lancedb import index

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.native_vectors import open_originals
from nobackfill.adopt.fitting import FitFiles, fit_and_judge
from nobackfill.adopt.maps import fit_maps, load_map
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Reversible, Searchable, Target
from nobackfill.errors import AlreadyExistsError, BusyError, InvalidInputError, NotFoundError
from nobackfill.plugins.lancedb import LanceSource
from nobackfill.plugins.sqlite_vec import VecDatabase
from nobackfill.vectors import Vectors
from tests.adopt.made import write_parquet
from tests.adopt.stores import MADE, Lance, SqliteVec

MAP = fit_maps(MADE.old, MADE.new)["affine"]


def target(name: str, content: str | None = None) -> Target:
    return Target(name, MAP.dims[1], MAP.digest, content_column=content)


@pytest.fixture
def lance(tmp_path: Path) -> Lance:
    return Lance(tmp_path / "lance")


@pytest.fixture
def sqlite(tmp_path: Path) -> Iterator[SqliteVec]:
    store = SqliteVec(tmp_path / "store.db")
    yield store
    store.connection.close()


def reversible(address: str, vector: str | None = None) -> Reversible:
    source = open_source(address, vector=vector)
    assert isinstance(source, Reversible)
    return source


def vectors_of(address: str, vector: str | None = None) -> dict[str, Vectors]:
    rows = read_all(open_source(address, vector=vector))
    return dict(zip(rows.ids, rows.vectors, strict=True))


@pytest.mark.parametrize("kind", ["lance", "sqlite"])
def test_fit_tells_what_carrying_takes_and_writes_nothing(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Within a factor of ten, on a machine that others use."""
    store: Lance | SqliteVec = request.getfixturevalue(kind)
    place = store.folder if isinstance(store, Lance) else store.path
    address = f"{'lancedb' if isinstance(store, Lance) else 'sqlite'}:{place}#docs"
    new = write_parquet(tmp_path / "new.parquet", MADE.ids[:60], MADE.new[:60])
    files = sorted(p for p in place.rglob("*") if p.is_file()) or [place]
    before = [one.read_bytes() for one in files]

    def told() -> tuple[float, str]:
        found = fit_and_judge(
            address, str(new), FitFiles(tmp_path / "map.npz"), None, None, True, key=None,
            vector=None,
        )  # fmt: skip
        (option,) = (one for one in found.json_answer["ways"] if one["name"] == "map")  # type: ignore[attr-defined]
        return option["all_seconds"], " ".join(found.terminal_lines)

    seconds, lines = told()
    assert "leaves out" not in lines
    assert [one.read_bytes() for one in files] == before
    mapping = load_map(tmp_path / "map.npz")
    begun = time.perf_counter()
    carry(
        open_source(address), replace(target("docs_new"), computer_digest=mapping.digest), mapping
    )
    took = time.perf_counter() - begun
    assert took / 10 < seconds < took * 10
    if isinstance(store, Lance):
        store.table.create_index("vector", config=index.IvfFlat(num_partitions=1))
        _, lines = told()
        assert '"in all" leaves out building the index' in lines


def check_mapped(found: dict[str, Vectors]) -> None:
    assert set(found) == set(MADE.ids)
    for name, vector in zip(MADE.ids, MAP(MADE.old), strict=True):
        np.testing.assert_allclose(found[name], vector, atol=1e-5)


def test_lancedb_flips_and_goes_back(lance: Lance) -> None:
    address = f"lancedb:{lance.folder}#docs"
    lance.table.create_index("vector", config=index.IvfFlat(distance_type="cosine"))
    assert lance.open().facts().metric == "cosine"
    assert carry(lance.open(), target("vector_new"), MAP, flip=True).new_vector_count == 230
    assert {one.columns[0] for one in lance.table.list_indices()} == {"vector", "vector_before"}
    check_mapped(vectors_of(address, "vector"))
    with pytest.raises(InvalidInputError, match="of this map already"):
        open_source(address, vector="vector").open_target(target("again"))
    # One row changes, one comes and one goes after the flip.
    changed = pa.FixedSizeListArray.from_arrays(pa.array(MADE.new[:2].ravel()), MAP.dims[1])
    rows = pa.table({"id": [MADE.ids[7], "new"], "vector": changed, "text": ["changed", "new"]})
    upsert = lance.table.merge_insert("id").when_matched_update_all()
    upsert.when_not_matched_insert_all().execute(rows)
    lance.delete(MADE.ids[8])
    with pytest.raises(InvalidInputError, match="2 rows were written since the flip"):
        reversible(address, "vector").flip_back("vector_new")
    assert reversible(address, "vector").flip_back("vector_new", allow_loss=True) == 2
    assert set(lance.table.schema.names) == {"id", "vector", "text"}
    found = vectors_of(address)
    assert set(found) == set(MADE.ids) - {MADE.ids[7], MADE.ids[8]}
    np.testing.assert_array_equal(found[MADE.ids[3]], MADE.old[3])


def test_a_writer_that_opened_lancedb_before_the_flip_loses_nothing(lance: Lance) -> None:
    stale = lancedb.connect(lance.folder).open_table("docs")
    assert stale.schema.names == ["id", "vector", "text"]
    carry(lance.open(), target("vector_new"), MAP, flip=True)
    stale.add(lance._rows(["late"], MADE.old[5:6]))
    address = f"lancedb:{lance.folder}#docs"
    filled = carry(open_source(address, vector="vector_before"), target("vector"), MAP)
    assert filled.write_count == 1
    found = vectors_of(address, "vector")
    np.testing.assert_allclose(found["late"], MAP(MADE.old[5:6])[0], atol=1e-5)


def test_lancedb_undoes_a_flip_that_others_write_into(
    lance: Lance, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lance.open()
    carry(source, target("vector_new"), MAP)
    place = source.open_target(target("vector_new"))
    check = type(place)._refuse_pending  # type: ignore[attr-defined]

    def written_after(self: object, old: str, new: str) -> None:
        check(self, old, new)
        if old == "vector":
            lance.put(MADE.ids[0], MADE.old[1])

    monkeypatch.setattr(type(place), "_refuse_pending", written_after)
    with pytest.raises(BusyError, match="run the command again"):
        carry(lance.open(), target("vector_new"), MAP, flip=True)
    monkeypatch.undo()
    assert "vector_before" not in lance.table.schema.names
    assert carry(lance.open(), target("vector_new"), MAP, flip=True).write_count == 1


def test_lancedb_refuses_by_name(lance: Lance) -> None:
    def refuse(rows: pa.Table, words: str, **options: str) -> None:
        lance.database.create_table("odd", rows, mode="overwrite")
        with pytest.raises(InvalidInputError, match=words):
            list(open_source(f"lancedb:{lance.folder}#odd", **options).windows(10))

    short = lance._rows(MADE.ids[:2], MADE.old[:2])
    refuse(short.drop_columns("vector"), "found none")
    lists = pa.array([[1.0], [1.0, 2.0]], pa.list_(pa.float32()))
    refuse(short.set_column(1, "points", lists), "points are lists of another kind")
    refuse(short.set_column(0, "id", pa.array(["a", "a"])), "expected unique keys, found 'a' twice")
    refuse(short.set_column(0, "id", pa.array([0.5, 1.5])), "expected keys of text or integers")
    refuse(short, "expected a column of keys 'name'", key="name")
    with pytest.raises(NotFoundError, match="its tables are docs"):
        open_source(f"lancedb:{lance.folder}#nowhere")
    with pytest.raises(InvalidInputError, match="object stores"):
        open_source("lancedb:s3://bucket#docs")


def test_half_precision_and_integers_as_keys_in_lancedb(lance: Lance) -> None:
    halves = pa.FixedSizeListArray.from_arrays(pa.array(MADE.old.astype(np.float16).ravel()), 24)
    numbers = pa.array(range(-100, 130), pa.int16())
    rows = pa.table({"number": numbers, "vector": halves})
    lance.database.create_table("halves", rows)
    source = open_source(f"lancedb:{lance.folder}#halves", key="number")
    assert carry(source, target("vector_new"), MAP, rows_per_window=60).new_vector_count == 230
    assert carry(source, target("vector_new"), MAP, rows_per_window=60).write_count == 0
    assert isinstance(source, Searchable)
    assert source.lookup(["7", "40000", "9" * 5000, str(2**64), "-0x1", "x"]).ids == ["7"]
    kind = lance.database.open_table("halves").schema.field("vector_new").type
    assert kind == pa.list_(pa.float16(), MAP.dims[1])


def test_rows_without_a_vector_shift_no_key_in_lancedb(lance: Lance) -> None:
    lance.table.update(where=f"id = '{MADE.ids[1]}'", values_sql={"vector": "NULL"})
    source = lance.open()
    assert isinstance(source, LanceSource)
    rows = source.to_rows(source.select_rows(["id", "vector"], None).sort_by("id"), "vector")
    assert rows.ids == [MADE.ids[0], *MADE.ids[2:]]
    np.testing.assert_array_equal(rows.vectors, MADE.old[[0, *range(2, 230)]])


def test_sqlite_flips_with_all_columns_and_goes_back(sqlite: SqliteVec) -> None:
    address = f"sqlite:{sqlite.path}#docs"
    sqlite.connection.execute("CREATE TABLE items (id text primary key)")
    sqlite.connection.execute(
        "CREATE TRIGGER gone AFTER DELETE ON items BEGIN DELETE FROM docs WHERE id = OLD.id; END"
    )
    sqlite.connection.execute("INSERT INTO items VALUES (?)", (MADE.ids[8],))
    query = "SELECT id, kind, bits, number, text FROM docs ORDER BY id"
    before = sqlite.connection.execute(query).fetchall()
    assert carry(sqlite.open(), target("docs_new"), MAP, flip=True).new_vector_count == 230
    assert sqlite.connection.execute(query).fetchall() == before
    check_mapped(vectors_of(address))
    with pytest.raises(InvalidInputError, match="nothing is left to do"):
        sqlite.open().open_target(target("docs_new"))
    # After the flip a row changes, one comes, and a trigger deletes one.
    sqlite.put(MADE.ids[7], MADE.new[0])
    sqlite.put("new", MADE.new[1])
    sqlite.connection.execute("DELETE FROM items")
    with pytest.raises(InvalidInputError, match="2 rows were written since the flip"):
        reversible(address).flip_back("docs_new")
    assert reversible(address).flip_back("docs_new", allow_loss=True) == 2
    found = vectors_of(address)
    assert set(found) == set(MADE.ids) - {MADE.ids[7], MADE.ids[8]}
    np.testing.assert_array_equal(found[MADE.ids[3]], MADE.old[3])
    assert sqlite.connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_sqlite_keeps_rows_that_a_writer_puts_into_both_tables(sqlite: SqliteVec) -> None:
    carry(sqlite.open(), target("docs_new"), MAP)
    sqlite.put("both", MADE.old[3])
    sqlite.put("both", MADE.new[4], "docs_new")
    sqlite.put(MADE.ids[7], MADE.old[9])
    assert carry(sqlite.open(), target("docs_new"), MAP, flip=True).write_count == 1
    found = vectors_of(f"sqlite:{sqlite.path}#docs")
    np.testing.assert_allclose(found["both"], MADE.new[4], atol=1e-6)
    np.testing.assert_allclose(found[MADE.ids[7]], MAP(MADE.old[9:10])[0], atol=1e-5)


def test_texts_that_look_like_numbers_are_keys_in_sqlite(tmp_path: Path) -> None:
    connection = apsw.Connection(str(tmp_path / "store.db"))
    connection.enable_load_extension(True)
    sqlite_vec.load(connection)
    connection.execute("CREATE VIRTUAL TABLE docs USING vec0(id text primary key, v float[24])")
    names = ["7", "007", "1e3", "1000", "1.0", "1", "-0", str(2**53 + 1), " 5", "0x10"]
    old = dict(zip(names, MADE.old[: len(names)], strict=True))

    def put(name: str) -> None:
        values = (name, old[name].astype("<f4").tobytes())
        connection.execute("DELETE FROM docs WHERE id = ?", (name,))
        connection.execute("INSERT INTO docs VALUES (?, ?)", values)

    def check(relation: str) -> None:
        new = vectors_of(f"sqlite:{tmp_path / 'store.db'}#{relation}")
        assert set(new) == set(old)
        for name, vector in old.items():
            np.testing.assert_allclose(new[name], MAP(vector[None])[0], atol=1e-5)

    for name in names:
        put(name)
    source = reversible(f"sqlite:{tmp_path / 'store.db'}#docs")
    assert carry(source, target("docs_new"), MAP).write_count == len(names)
    assert carry(source, target("docs_new"), MAP).write_count == 0
    old["007"], old["1000"] = MADE.old[100:102]
    put("007")
    put("1000")
    connection.execute("DELETE FROM docs WHERE id = '1.0'")
    del old["1.0"]
    assert carry(source, target("docs_new"), MAP).write_count == 2
    check("docs_new")
    carry(source, target("docs_new"), MAP, flip=True)
    check("docs")
    assert reversible(f"sqlite:{tmp_path / 'store.db'}#docs").flip_back("docs_new") == 0
    connection.close()


def test_digests_of_an_earlier_version_are_read_or_refused_in_sqlite(sqlite: SqliteVec) -> None:
    """It declared their key as ANY."""
    carry(sqlite.open(), target("docs_new"), MAP)
    connection = sqlite.connection
    connection.execute("DROP INDEX nobackfill_items_place")
    connection.execute("ALTER TABLE nobackfill_items RENAME TO other")
    connection.execute(
        "CREATE TABLE nobackfill_items (map TEXT, key ANY, place INTEGER, of TEXT, made TEXT, "
        "PRIMARY KEY (map, key)) WITHOUT ROWID"
    )
    connection.execute("INSERT INTO nobackfill_items SELECT * FROM other")
    connection.execute("DROP TABLE other")
    assert carry(sqlite.open(), target("docs_new"), MAP).write_count == 0
    sqlite.put("007", MADE.old[7])
    assert carry(sqlite.open(), target("docs_new"), MAP).write_count == 1
    assert carry(sqlite.open(), target("docs_new"), MAP).write_count == 0
    connection.execute("UPDATE nobackfill_items SET key = 7 WHERE key = '007'")
    with pytest.raises(AlreadyExistsError, match="keys such as '007' as numbers"):
        carry(sqlite.open(), target("docs_new"), MAP)
    assert sqlite.open().drop_new_vectors("docs_new")
    assert carry(sqlite.open(), target("docs_new"), MAP).write_count == 231


def test_texts_of_an_ordinary_table_make_a_row_stale(sqlite: SqliteVec) -> None:
    sqlite.connection.execute("CREATE TABLE items (id text primary key, body text)")
    sqlite.connection.execute("INSERT INTO items SELECT id, 'about ' || id FROM docs")
    source, wanted = sqlite.open(), target("docs_new", content="items.body")
    name = MADE.ids[5]
    assert (
        source.read_column(next(source.windows(300)), "items.body").values[0].startswith("about ")
    )
    assert open_originals(source, "items.body", None).column == "items.body"
    for wrong in ("items.nope", "nope.body", "body"):
        with pytest.raises(InvalidInputError, match=f"column of texts, got '{wrong}'; .*text"):
            open_originals(source, wrong, None)
    assert carry(source, wanted, MAP).write_count == 230
    sqlite.connection.execute("UPDATE items SET body = 'changed' WHERE id = ?", (name,))
    assert carry(source, wanted, MAP).write_count == 1
    with pytest.raises(InvalidInputError, match=r"no column 'body'; .* TABLE\.COLUMN"):
        source.read_column(next(source.windows(300)), "body")


def test_a_failed_rename_in_sqlite_leaves_no_setting(sqlite: SqliteVec) -> None:
    sqlite.connection.execute("CREATE TABLE other (id integer)")
    database = VecDatabase(str(sqlite.path))
    with pytest.raises(InvalidInputError, match="already another table"):
        database.rename("docs", "other")
    assert database.query_all("PRAGMA legacy_alter_table") == [(0,)]
    assert sqlite.names() == sorted(MADE.ids)


def test_sqlite_refuses_by_name(sqlite: SqliteVec) -> None:
    def refuse(definition: str, words: str) -> None:
        sqlite.connection.execute("DROP TABLE IF EXISTS odd")
        sqlite.connection.execute(definition)
        with pytest.raises(InvalidInputError, match=words):
            open_source(f"sqlite:{sqlite.path}#odd")

    refuse("CREATE TABLE odd (id integer primary key, v blob)", "expected a virtual table of vec0")
    refuse("CREATE VIRTUAL TABLE odd USING vec0(v int8[8])", "v int8 cannot be migrated")
    refuse("CREATE VIRTUAL TABLE odd USING vec0(a float[8], b float[8])", "found a, b; name one")
    with pytest.raises(NotFoundError, match="one of its vec0 tables after #: docs"):
        open_source(f"sqlite:{sqlite.path}#nowhere")
    other = sqlite.path.with_name("other.db")
    apsw.Connection(str(other)).execute("CREATE TABLE plain (id integer primary key)")
    with pytest.raises(NotFoundError, match="such table; it has no vec0 table"):
        open_source(f"sqlite:{other}#nowhere")
    with pytest.raises(InvalidInputError, match="not a database"):
        text = sqlite.path.with_suffix(".txt")
        text.write_text("no database" * 100)
        open_source(f"sqlite:{text}#docs")
    with pytest.raises(InvalidInputError, match="expected no --key"):
        open_source(f"sqlite:{sqlite.path}#docs", key="id")
    # vec0 takes "bit8" for bit: it stores an eighth of a byte for each.
    sqlite.connection.execute("CREATE VIRTUAL TABLE bits USING vec0(v float[24], b bit8[16])")
    for place in (1, 2):
        vector, bits = MADE.old[place].astype("<f4").tobytes(), bytes([place, 255])
        sqlite.connection.execute(
            "INSERT INTO bits (rowid, v, b) VALUES (?, ?, vec_bit(?))", (place, vector, bits)
        )
    assert (
        carry(open_source(f"sqlite:{sqlite.path}#bits"), target("bits_new"), MAP).new_vector_count
        == 2
    )
    query = "SELECT hex(b) FROM bits_new ORDER BY rowid"
    assert sqlite.connection.execute(query).fetchall() == [("01FF",), ("02FF",)]
    # vec0 takes "float16" for float: it stores 32 bits.
    sqlite.connection.execute("CREATE VIRTUAL TABLE halves USING vec0(v float16[24])")
    vector = MADE.old[0].astype("<f4").tobytes()
    largest = 2**63 - 1
    for place in (1, largest):
        values = (place, vector)
        sqlite.connection.execute("INSERT INTO halves (rowid, v) VALUES (?, ?)", values)
    found = vectors_of(f"sqlite:{sqlite.path}#halves")
    np.testing.assert_array_equal(found["1"], MADE.old[0])
    source = reversible(f"sqlite:{sqlite.path}#halves")
    assert isinstance(source, Searchable)
    ids = [str(largest), str(largest + 1), "9" * 5000, "x"]
    assert source.lookup(ids).ids == [str(largest)]
    # A window begins after the largest rowid.
    assert carry(source, target("halves_new"), MAP, rows_per_window=1).new_vector_count == 2
