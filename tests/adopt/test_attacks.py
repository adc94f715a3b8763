"""What strangers give: names that are SQL, secrets in addresses, files that are none."""

import contextlib
import io
import json
import shutil
import sqlite3
import sys
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.endpoint import Endpoint
from nobackfill.adopt.embedding.vector_folder import ItemList, embed_into, read_items
from nobackfill.adopt.joining import load_rank_fusion, save_rank_fusion
from nobackfill.adopt.maps import fit_maps, load_map, save_map
from nobackfill.adopt.pairs import inspect, match_by_id
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, ROLE_KEY, SECONDS_KEY, ParquetSource
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import (
    AlreadyExistsError,
    CannotWriteError,
    ConfigurationError,
    InvalidInputError,
    UnavailableError,
    VerificationError,
)
from nobackfill.serve import NativeVectorFile
from nobackfill.serving.fusion import FittedRankFusion, OddsLine
from tests.adopt.made import world, write_parquet
from tests.adopt.models import text_model
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


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("postgresql://u:%SECRET@localhost/d#t", "a % is not followed by two hexadecimal digits"),
        ("postgresql://u:SECRET x@localhost/d#t", "it contains a space"),
        ("postgresql://u@localhost/d?secret=1#t", "a name after ? is no connection parameter"),
        ("postgresql://u@localhost/d?sslmode#t", "a parameter after ? has no =VALUE"),
        ("postgresql://u@localhost/d?a=b=c#t", "a parameter after ? has a second ="),
        ("postgresql://u@[::1/d#t", "a part of it is malformed"),
    ],
)
def test_the_fault_of_an_address_is_named(address: str, fault: str) -> None:
    with pytest.raises(InvalidInputError) as refused:
        open_source(address)
    assert fault in str(refused.value)
    assert "SECRET" not in str(refused.value)


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
        done = carry(source, target(new), MAP, rows_per_window=15)
        assert done.new_vector_count == 40
        assert carry(open_source(f"{address}#places"), target("new"), MAP).new_vector_count == 2
        owners = connection.execute(
            "SELECT pronamespace::regnamespace::text FROM pg_proc WHERE proname LIKE 'nobackfill%'"
        ).fetchall()
        assert sorted(owners) == [("public",), ("shop",)]
        # An old vector that changes empties the new one, whatever that is called.
        connection.execute("UPDATE places SET v = NULL WHERE id = 'a'")
        assert connection.execute("SELECT count(new) FROM places").fetchone() == (1,)
        # However the table is named, what was made is found.
        assert open_source(f"{address}#public.places").drop_new_vectors("new")
        for step in done.next_steps:
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
        steps = carry(source, target("n"), MAP).next_steps
        # Opened before there was such a column: still another map's.
        with pytest.raises(AlreadyExistsError, match="not made by this map"):
            late.open_target(Target("n", MAP.dims[1], "another"))
        connection.execute(steps[-1].encode())
        # The old vectors in v_before are not what is searched.
        assert open_source(f"{address}#t").facts().dim == MAP.dims[1]
        # What now answers searches is nothing that can be taken back.
        assert not open_source(f"{address}#t").drop_new_vectors("v")


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
                source.drop_new_vectors(name)
        assert not open_source(str(address)).drop_new_vectors("never")
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
        "broken zip": lambda path: path.write_bytes(b"PK\x03\x04 broken"),
        "no dimension": lambda path: np.save(path, np.ones((2, 0))),
        "huge header": lambda path: path.write_bytes(header(2**31 - 1, "{")),
        "long header": lambda path: path.write_bytes(header(10**6, "(" * 10**6)),
    }
    for name, write in bad.items():
        folder = tmp_path / name
        folder.mkdir()
        np.save(folder / "ids.npy", ids)
        write(folder / "v.npy")
        with pytest.raises(InvalidInputError):
            open_source(str(folder))
    (tmp_path / "map.npz").write_bytes((tmp_path / "ids.npy").read_bytes())
    with pytest.raises(InvalidInputError, match="expected a file that"):
        load_map(tmp_path / "map.npz")


def entries(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def header(size: int, text: str) -> bytes:
    return b"\x93NUMPY\x02\0" + size.to_bytes(4, "little") + text.encode()


def crafted(good: Path, array: str) -> dict[str, bytes]:
    """Files in place of one of ours; `array`: one of its arrays."""
    parts = entries(good)
    said = json.loads(str(np.load(good)["header"]))
    number = "bias" if array == "weight" else "new"
    claims = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s,), }\n"
    strange: dict[str, dict[str, bytes]] = {
        "huge shape": {array: header(80, claims % "10**15".rjust(24))},
        "huge header": {array: header(2**31 - 1, "{")},
        "long header": {array: header(10**6, "(" * 10**6)},
        "negative": {array: header(80, (claims % "-1, -1").ljust(80))},
        "no dimension": {array: npy(np.zeros((24, 0), np.float32)), number: npy(np.zeros((0, 24)))},
        "one dimension": {array: npy(np.zeros(24, np.float32))},
        "no array": {array: b"PK\x03\x04"},
        "pickle": {array: b"\x93NUMPY\x01\0" + npy(np.array([{}], object))[8:]},
        "texts": {array: npy(np.array([["x"]]))},
        "NaN": {array: npy(np.full((24, 24), np.nan, np.float32))},
        "version": {array: b"\x93NUMPY\x09\x09" + parts[f"{array}.npy"][8:]},
    }
    texts = {
        "deep": "[" * 10**5,
        "list": "[]",
        "empty": "",
        "number": "1",
        "long number": "1" * 10**5,
        **{
            f"{key} is {value}": json.dumps(said | {key: "?"}).replace('"?"', value)
            for key in ("format", "layers", "weight", "joined", "facts")
            for value in ("1e400", "[[]]", "null", "NaN")
            if key in said or (key == "layers" and "facts" in said)
        },
    }  # fmt: skip
    strange |= {name: {"header": npy(np.array(text))} for name, text in texts.items()}
    found = {"nothing": b"", "text": b"no zip at all"}
    for name, changed in strange.items():
        found[name] = packed(parts | {f"{one}.npy": data for one, data in changed.items()})
    found["missing"] = packed({f"{array}.npy": parts[f"{array}.npy"]})
    found["cut"] = good.read_bytes()[:-200]
    bomb = npy(np.zeros((4000, 4000), np.float32))
    found["bomb"] = packed(parts | {f"{array}.npy": bomb}, zipfile.ZIP_DEFLATED)
    whole = good.read_bytes()
    for name, place, value in (("encrypted", 8, 1), ("unknown method", 10, 99)):
        # In the directory at the end, and before the first file's own bytes.
        data = bytearray(whole)
        first = whole.index(b"PK\x01\x02")
        data[first + place] = data[place - 2] = value
        found[name] = bytes(data)
    return found


def packed(parts: Mapping[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def test_maps_and_joinings_of_strangers_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.npz"
    anchors = MADE.old[:5], MADE.new[:5], MADE.new[:5]
    for load, array in ((load_map, "weight"), (load_rank_fusion, "old")):
        if array == "weight":
            save_map(good, MAP)
        else:
            save_rank_fusion(good, FittedRankFusion(0.5, OddsLine(), OddsLine(), *anchors))
        load(good)
        for name, data in crafted(good, array).items():
            path = tmp_path / "bad.npz"
            path.write_bytes(data)
            with pytest.raises(InvalidInputError, match="run that command again"):
                load(path)
                pytest.fail(f"{name} was read")


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_map_or_joining_is_read_or_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "file.npz"
        load: Callable[[Path], object] = load_map
        if data.draw(st.booleans()):
            save_map(path, MAP)
        else:
            load = load_rank_fusion
            anchors = MADE.old[:5], MADE.new[:5], MADE.new[:5]
            save_rank_fusion(path, FittedRankFusion(0.5, OddsLine(), OddsLine(), *anchors))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 8))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
        with contextlib.suppress(InvalidInputError):
            load(path)


@pytest.mark.long
@pytest.mark.slow
def test_ids_that_come_twice_are_told_in_one_pass(tmp_path: Path) -> None:
    """60,000 lines took 41 s of a processor, 200,000 would ten times as long."""
    path = tmp_path / "items.jsonl"
    ids = [*range(200_000), 199_999]
    path.write_text("".join(f'{{"id": {one}, "text": "x"}}\n' for one in ids))
    begun = time.process_time()
    with pytest.raises(InvalidInputError, match="each id once, found '199999' at several items"):
        read_items(str(path), column="text")
    assert time.process_time() - begun < 40


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        # The first file includes the model's start; a last file of few items is luck. A pause that
        # one file had, on a busy machine or for an endpoint's limit, others will have too.
        ([(40, "0.9"), (40, "0.1"), (20, "0.4"), (3, "0.001")], 0.2),
        ([(40, "0.9"), (3, "0.1")], 0.9),
        ([(40, "0.9")], 0.9),
    ],
)
def test_the_time_of_an_item_is_the_mean_of_large_files_after_the_first(
    tmp_path: Path, files: list[tuple[int, str]], expected: float
) -> None:
    for number, (rows, seconds) in enumerate(files):
        file = write_parquet(tmp_path / f"{number}.parquet", MADE.ids[:rows], MADE.old[:rows])
        table = pq.read_table(file).replace_schema_metadata({SECONDS_KEY: seconds})
        pq.write_table(table, file)
    assert ParquetSource(tmp_path).seconds_per_item() == pytest.approx(expected)


def test_metadata_of_parquet_and_natives_that_are_none_are_refused(tmp_path: Path) -> None:
    table = pq.read_table(write_parquet(tmp_path / "a.parquet", MADE.ids, MADE.old))
    for seconds in (b"\xff", b"1e400", b"nan"):
        said = {SECONDS_KEY: seconds, MODEL: b"\xff", ROLE_KEY: b"\xff"}
        pq.write_table(table.replace_schema_metadata(said), tmp_path / "a.parquet")
        source = ParquetSource(tmp_path / "a.parquet")
        assert source.seconds_per_item() is None
        assert source.text_role() and source.facts().model
    for number, blob in enumerate((b"short", "text", 5, np.full(2, np.nan, "<f4").tobytes())):
        path = tmp_path / f"{number}.db"
        with closing(NativeVectorFile(path, "model", 2)) as natives:
            with closing(sqlite3.connect(path)) as other, other:
                other.execute(
                    "INSERT INTO native (id, seen, vector) VALUES ('a', x'00', ?)", [blob]
                )
            with pytest.raises(VerificationError, match="delete"):
                natives.read_vectors(["a"])


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644])
def test_new_vectors_are_for_whom_the_old_ones_are(tmp_path: Path, mode: int) -> None:
    for name in ("ids", "v"):
        (tmp_path / f"{name}.npy").touch(mode)
    np.save(tmp_path / "ids.npy", np.array(MADE.ids))
    np.save(tmp_path / "v.npy", MADE.old)
    parquet = write_parquet(tmp_path / "p" / "a.parquet", MADE.ids, MADE.old)
    for file in (tmp_path / "v.npy", parquet):
        file.chmod(mode)
    for source in (tmp_path, parquet):
        carry(open_source(str(source)), target("new"), MAP)
    made = [tmp_path / "new.npy", *(tmp_path / "p").rglob("_*/*.parquet")]
    assert len(made) == 2
    assert {file.stat().st_mode & 0o777 for file in made} == {mode}


def test_embedded_vectors_are_for_nobody_else(tmp_path: Path) -> None:
    text_model(tmp_path / "model", 0)
    items = ItemList("text", ["a"], ["some words"])
    embed_into(tmp_path / "new", items, open_embedder(str(tmp_path / "model" / "model.onnx")))
    (made,) = (tmp_path / "new").glob("*.parquet")
    assert made.stat().st_mode & 0o777 == 0o600


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
        with pytest.raises(InvalidInputError, match=r"new\.parquet#vector: .*zeros .*'item-3'"):
            match_by_id(open_source(str(first)), open_source(str(second)))
    columns = [["a"], ["b"], [[1.0]]]
    pq.write_table(pa.table(columns, names=["id", "id", "v"]), tmp_path / "twice.parquet")
    with pytest.raises(
        InvalidInputError, match="each column to have a name of its own, got id, id, v"
    ):
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
    assert found.contents[0] == "one\u2028line"
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
