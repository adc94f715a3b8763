"""What strangers give: names that are SQL, secrets in addresses, files that are none."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.closed_form import fit_maps
from nobackfill.adopt.embedding.endpoint import Endpoint
from nobackfill.adopt.embedding.items import read_items
from nobackfill.adopt.embedding.opening import open_embedder
from nobackfill.adopt.inspection import inspect
from nobackfill.adopt.maps import load_map
from nobackfill.adopt.pairs import match
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import (
    AlreadyExistsError,
    CannotWriteError,
    ConfigurationError,
    InvalidInputError,
    UnavailableError,
)
from tests.adopt.made import world, write_parquet
from tests.support.postgres import Server

MADE = world(40)
MAP = fit_maps(MADE.old, MADE.new)["procrustes"]


def target(name: str) -> Target:
    return Target(name, MAP.dims[1], MAP.digest)


def test_no_sentence_repeats_a_password(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = (
        "postgresql://u:SECRET@localhost/d",
        "postgresql+psycopg://u:SECRET@localhost/d#t",
        "postgresql://u:%SECRET@localhost/d#t",
        "postgresql://u:SECRET/x@localhost/d#t",
        "postgresql://u:SECRET#x@localhost/d#t",
        "postgresql://u:SECRET@localhost/\udcff#t",
        "postgresql://u:SECRET@localhost/d#\udcff",
    )
    for address in addresses:
        with pytest.raises((InvalidInputError, UnavailableError)) as refused:
            open_source(address)
        assert "SECRET" not in str(refused.value), address
    for url in (
        "https://u:SECRET@h/v1",
        "https://[SECRET",
        "https:///SECRET",
        "http://h/?k=SECRET",
    ):
        with pytest.raises(ConfigurationError) as ended:
            Endpoint(url, "small")
        assert "SECRET" not in str(ended.value), url
    with pytest.raises(InvalidInputError) as nameless:
        open_embedder("https://h/?k=SECRET")
    assert "SECRET" not in str(nameless.value)


def test_names_are_names_and_keys_of_any_type_are_carried(postgres: Server) -> None:
    """A quote, a dollar quote, a per cent sign and braces in names; keys of a domain and an
    enumeration; a schema of the table's own, where alone its owner may make things."""
    with postgres.connected() as (address, connection):
        for statement in (
            "CREATE EXTENSION vector",
            "CREATE SCHEMA shop",
            "CREATE DOMAIN sku AS varchar(20)",
            "CREATE TYPE place AS ENUM ('a', 'b')",
            """CREATE TABLE shop."d""o%c{}" (id sku PRIMARY KEY, "v""$$%s{}" vector(24))""",
            "CREATE TABLE places (id place PRIMARY KEY, v vector(24))",
        ):
            connection.execute(statement.encode())
        rows = [(name, str(v.tolist())) for name, v in zip(MADE.ids, MADE.old, strict=True)]
        cursor = connection.cursor()
        cursor.executemany("""INSERT INTO shop."d""o%%c{}" VALUES (%s, %s)""", rows)
        cursor.executemany(
            "INSERT INTO places VALUES (%s, %s)", [("a", rows[0][1]), ("b", rows[1][1])]
        )
        source = open_source(f'{address}#shop.d"o%c{{}}')
        new = 'n$$; DROP TABLE places; --"{}%s'
        done = carry(source, target(new), MAP, window=15)
        assert done.total == 40
        assert carry(open_source(f"{address}#places"), target("new"), MAP).total == 2
        owners = connection.execute(
            "SELECT pronamespace::regnamespace::text FROM pg_proc WHERE proname LIKE 'nobackfill%'"
        ).fetchall()
        assert sorted(owners) == [("public",), ("shop",)]
        # An old vector that changes empties the new one, whatever that is called.
        connection.execute("UPDATE places SET v = NULL WHERE id = 'a'")
        assert connection.execute("SELECT count(new) FROM places").fetchone() == (1,)
        # However the table is named, what was made is found.
        assert open_source(f"{address}#public.places").rollback("new")
        for step in done.steps:
            if step.startswith(("CREATE", "BEGIN")):
                connection.execute(step.encode())


def test_after_the_flip_the_new_vectors_are_the_sources_own(postgres: Server) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute("CREATE TABLE t (id text PRIMARY KEY, v vector(24))")
        connection.execute("INSERT INTO t VALUES ('a', %s)", [str(MADE.old[0].tolist())])
        source = open_source(f"{address}#t")
        for name in ("n" * 64, "ü" * 32):
            with pytest.raises(InvalidInputError, match="at most 63 bytes"):
                carry(source, target(name), MAP)
        late = open_source(f"{address}#t")
        steps = carry(source, target("n"), MAP).steps
        # Opened before there was such a column: still another map's.
        with pytest.raises(AlreadyExistsError, match="not made by this map"):
            late.beside(Target("n", MAP.dims[1], "another"))
        connection.execute(steps[-1].encode())
        with pytest.raises(InvalidInputError, match="found v_before, v; name one"):
            open_source(f"{address}#t")
        assert open_source(f"{address}#t", vector="v").facts().dim == MAP.dims[1]
        # What now answers searches is nothing that can be taken back.
        assert not open_source(f"{address}#t", vector="v").rollback("v")


def test_a_database_that_is_only_read_is_said_to_be(postgres: Server) -> None:
    with postgres.database() as address:
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("CREATE EXTENSION vector")
            connection.execute("CREATE TABLE t (id text PRIMARY KEY, v vector(24))")
        separator = "&" if "?" in address else "?"
        read_only = f"{address}{separator}options=-cdefault_transaction_read_only%3Don"
        source = open_source(f"{read_only}#t")
        with pytest.raises(CannotWriteError, match="read-only"):
            carry(source, target("n"), MAP)


def test_new_vectors_stay_beside_the_old(tmp_path: Path) -> None:
    folder = tmp_path / "arrays"
    folder.mkdir()
    np.save(folder / "ids.npy", np.array(MADE.ids))
    np.save(folder / "v.npy", MADE.old)
    parquet = write_parquet(tmp_path / "p" / "a.parquet", MADE.ids, MADE.old)
    before = sorted(tmp_path.rglob("*"))
    for address in (folder, parquet, parquet.parent):
        for name in ("", "../out", "/out", ".."):
            source = open_source(str(address))
            with pytest.raises(InvalidInputError, match="--to: expected a name"):
                carry(source, target(name), MAP)
            with pytest.raises(InvalidInputError, match="--to: expected a name"):
                source.rollback(name)
        assert not open_source(str(address)).rollback("never")
    assert sorted(tmp_path.rglob("*")) == before


def test_arrays_that_are_none_are_refused(tmp_path: Path) -> None:
    ids = np.array(["a", "b"])
    np.save(tmp_path / "ids.npy", ids)
    pickled = np.array([{"a": 1}, None], object)
    with (tmp_path / "zip.npy").open("wb") as file:
        np.savez(file, a=ids)
    bad: dict[str, Callable[[Path], object]] = {
        "pickled": lambda path: np.save(path, pickled, allow_pickle=True),
        "texts": lambda path: np.save(path, np.array([["x"], ["y"]])),
        "complex": lambda path: np.save(path, np.ones((2, 3), complex)),
        "empty": lambda path: path.write_bytes(b""),
        "zip": lambda path: shutil.copy(tmp_path / "zip.npy", path),
    }
    for name, write in bad.items():
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "ids.npy", ids)
        write(folder / "v.npy")
        with pytest.raises(InvalidInputError):
            open_source(str(folder))
    (tmp_path / "map.npz").write_bytes((tmp_path / "ids.npy").read_bytes())
    with pytest.raises(InvalidInputError, match="expected a map"):
        load_map(tmp_path / "map.npz")


def test_parquet_of_another_kind_or_damaged_is_refused_by_its_name(tmp_path: Path) -> None:
    write_parquet(tmp_path / "s" / "a.parquet", MADE.ids[:20], MADE.old[:20])
    second = tmp_path / "s" / "b.parquet"
    for table in (
        pa.table({"id": MADE.ids[20:]}),
        pa.table({"id": MADE.ids[20:], "vector": ["text"] * 20}),
    ):
        pq.write_table(table, second)
        with pytest.raises(InvalidInputError, match=r"b\.parquet: expected columns id, vector"):
            carry(open_source(str(tmp_path / "s")), target("new"), MAP)
    write_parquet(second, MADE.ids[20:], MADE.old[20:])
    data = bytearray(second.read_bytes())
    data[4:1500] = bytes(1496)
    second.write_bytes(data)
    source = open_source(str(tmp_path / "s"))
    with pytest.raises(InvalidInputError, match=r"b\.parquet: cannot be read"):
        carry(source, target("new"), MAP)


def test_vectors_without_direction_and_columns_twice_are_named(tmp_path: Path) -> None:
    spoilt = MADE.new.copy()
    spoilt[3] = 0
    old = write_parquet(tmp_path / "old.parquet", MADE.ids, MADE.old)
    new = write_parquet(tmp_path / "new.parquet", MADE.ids, spoilt)
    for first, second in ((old, new), (new, old)):
        with pytest.raises(InvalidInputError, match=r"new\.parquet#vector: .* only in 'item-3'"):
            match(open_source(str(first)), open_source(str(second)))
    columns = [["a"], ["b"], [[1.0]]]
    pq.write_table(pa.table(columns, names=["id", "id", "v"]), tmp_path / "twice.parquet")
    with pytest.raises(InvalidInputError, match="each column once, got id, id, v"):
        open_source(str(tmp_path / "twice.parquet"))
    # Finite, beyond what squares of float32 hold.
    far = write_parquet(tmp_path / "far.parquet", MADE.ids, MADE.old * np.float32(1e30))
    norms = inspect(open_source(str(far))).norms
    assert norms is not None and np.isfinite(norms).all()


def test_lines_of_json_are_lines_texts_and_unicode(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    lines = ['{"id": 1, "text": "one\u2028line"}', '{"id": "2", "text": "x"}', ""]
    path.write_text("\r\n".join(lines), "utf-8")
    found = read_items(str(path), column="text")
    assert found.ids == ["1", "2"]
    assert found.values[0] == "one\u2028line"
    for line in (
        '{"id": null, "text": "x"}',
        '{"id": "a", "text": {"x": 1}}',
        '{"id": "a", "text": "\\ud800"}',
        '{"id": "\\udc00", "text": "x"}',
        "[" * 100_000,
        '{"id": "a"',
        "[]",
        '{"id": ' + "1" * 5000 + ', "text": "x"}',
    ):
        path.write_text(line, "utf-8")
        with pytest.raises(InvalidInputError, match="expected"):
            read_items(str(path), column="text")


def test_a_function_that_gives_no_vectors_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    answers = ("None", "5", "['a']", "[1.0]", "[[]]", "[[1.0], [2.0]]", "[]", "[[1.0], 2.0]")
    code = "".join(f"def f{n}(items): return {text}\n" for n, text in enumerate(answers))
    (tmp_path / "gives_no_vectors.py").write_text(code)
    for number in range(len(answers)):
        with pytest.raises(InvalidInputError, match=r"^gives_no_vectors:f\d: expected"):
            open_embedder(f"gives_no_vectors:f{number}").embed(["x"])
