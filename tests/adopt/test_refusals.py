"""What is wrong with others' data gets a sentence, an exit code, and nothing is lost."""

import re
from pathlib import Path

import apsw
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlite_vec

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.cli import main
from nobackfill.adopt.joining import save_rank_fusion
from nobackfill.adopt.maps import fit_maps, load_map, save_map
from nobackfill.adopt.pairs import inspect, match_by_id
from nobackfill.adopt.sources.arrays import ArraySource
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target, Window
from nobackfill.errors import InvalidInputError
from nobackfill.serving.fusion import FittedRankFusion, OddsLine
from nobackfill.vectors import Vectors
from tests.adopt.made import world, write_parquet
from tests.support.documents import run_command
from tests.support.postgres import Server

MADE = world(120)


def refused(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command says on stderr, in one line."""
    monkeypatch.setattr("sys.argv", ["nobackfill", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    assert said.count("\n") == 1
    return said


@pytest.mark.parametrize("name", [300 * "x", f"parquet:{300 * 'x'}"])
def test_a_name_that_no_file_can_have(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was a traceback."""
    said = refused(["inspect", name], 65, monkeypatch, capsys)
    assert said.startswith("nobackfill: ") and "no file can have this name" in said


@pytest.fixture(params=["numpy", "parquet", "sqlite"])
def empty(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The address of a store without items, and its name in sentences."""
    folder = tmp_path / "none"
    folder.mkdir()
    if request.param == "numpy":
        np.save(folder / "ids.npy", np.empty(0, "U4"))
        np.save(folder / "vector.npy", np.empty((0, 24), np.float32))
    elif request.param == "parquet":
        kinds = {"id": pa.string(), "vector": pa.list_(pa.float32())}
        columns = {key: pa.array([], kind) for key, kind in kinds.items()}
        pq.write_table(pa.table(columns), folder / "a.parquet")
    else:
        connection = apsw.Connection(str(folder / "g.db"))
        connection.enable_load_extension(True)
        sqlite_vec.load(connection)
        connection.execute(
            "CREATE VIRTUAL TABLE docs USING vec0(id text primary key, vector float[24])"
        )
        return f"sqlite:{folder / 'g.db'}#docs", "docs"
    return str(folder), "none"


def test_a_store_without_items_is_named(
    empty: tuple[str, str], paths: dict[str, str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    address, name = empty
    out = tmp_path / "out"
    for words, sentence in (
        (["sample", address], f"{name}.*: expected items with vectors, found none"),
        (["fit", "--old", paths["old"], "--new", address], f"found 0: .*{name}.* has no items"),
        (
            ["fit", "--old", address, "--new", paths["new"]],
            f"found 0: .*{name}.* has no vector for",
        ),
    ):
        said = refused([*words, "--out", str(out)], 65, monkeypatch, capsys)
        assert re.search(sentence, said), said
        assert not out.exists()
    # A table may get its items later, so that both of these are no errors.
    source = open_source(address)
    assert inspect(source).count == 0
    mapping = load_map(Path(paths["map"]))
    assert (
        carry(source, Target("later", mapping.dims[1], mapping.digest), mapping).new_vector_count
        == 0
    )


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    """Files that go together: old, new, a map."""
    save_map(tmp_path / "map.npz", fit_maps(MADE.old, MADE.new)["affine"])
    return {
        "old": str(write_parquet(tmp_path / "old.parquet", MADE.ids, MADE.old)),
        "new": str(write_parquet(tmp_path / "new.parquet", MADE.ids, MADE.new)),
        "map": str(tmp_path / "map.npz"),
    }


def spoilt(vectors: Vectors, row: int, value: float) -> Vectors:
    found = vectors.copy()
    found[row, 0] = value
    return found


def test_pairs_in_any_order_are_paired_by_id(tmp_path: Path, paths: dict[str, str]) -> None:
    order = np.random.default_rng(0).permutation(len(MADE.ids))[:90]
    ids = [MADE.ids[row] for row in order]
    mixed = write_parquet(
        tmp_path / "mixed.parquet", [*ids, "stranger"], np.vstack([MADE.new[order], MADE.new[:1]])
    )
    matched = match_by_id(open_source(paths["old"]), open_source(str(mixed)))
    assert matched.ids_without_old == ["stranger"]
    for name, old, new in zip(matched.pairs.ids, matched.pairs.old, matched.pairs.new, strict=True):
        row = MADE.ids.index(name)
        assert np.array_equal(old, MADE.old[row])
        assert np.array_equal(new, MADE.new[row])
    assert len(matched.pairs) == 90


def test_what_does_not_pair_is_refused(
    tmp_path: Path, paths: dict[str, str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    cases = {
        "at least 20 items with vectors of both models, found 0": (
            [f"other-{n}" for n in range(120)], MADE.new,
        ),
        "got 'item-0' more than once": (["item-0", *MADE.ids[:-1]], MADE.new),
        "NaN or infinity in 'item-4'": (MADE.ids, spoilt(MADE.new, 4, np.nan)),
    }  # fmt: skip
    for number, (words, (ids, vectors)) in enumerate(cases.items()):
        new = write_parquet(tmp_path / f"{number}.parquet", ids, vectors)
        out = tmp_path / "out.npz"
        command = ["fit", "--old", paths["old"], "--new", str(new), "--out", str(out)]
        assert words in refused(command, 65, monkeypatch, capsys)
        assert not out.exists()
    command = ["fit", "--old", paths["old"], "--new", paths["old"], "--out", str(out)]
    assert "got the vectors of --old" in refused(command, 65, monkeypatch, capsys)
    assert not out.exists()
    command = ["fit", "--old", paths["old"], "--new", str(new), "--out", f"{tmp_path}/no/map.npz"]
    assert f"there is no folder {tmp_path}/no" in refused(command, 73, monkeypatch, capsys)
    assert "in one of these forms: FILE.parquet" in refused(
        ["inspect", "shop"], 66, monkeypatch, capsys
    )
    assert "installed are chroma" in refused(["inspect", "nix:a#b"], 65, monkeypatch, capsys)
    command = ["fit", "--old", paths["old"], "--new", paths["new"], "--queries-old", paths["old"]]
    assert "together" in refused(command, 65, monkeypatch, capsys)
    swapped = ["--queries-old", paths["new"], "--queries-new", paths["old"]]
    said = refused([*command[:5], *swapped], 65, monkeypatch, capsys)
    assert "embed the queries with the old model" in said


def test_rows_of_two_models_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    paths: dict[str, str],
) -> None:  # fmt: skip
    mixed = tmp_path / "mixed.parquet"
    vectors = [*MADE.old[:5].tolist(), MADE.new[5].tolist()]
    pq.write_table(pa.table({"id": MADE.ids[:6], "vector": vectors}), mixed)
    before = mixed.read_bytes()
    command = ["carry", str(mixed), "--map", paths["map"], "--to", "new"]
    said = refused(command, 65, monkeypatch, capsys)
    assert "got 24 in 'item-0' and 32 in 'item-5'" in said
    assert mixed.read_bytes() == before
    # All rows by the new model: the map is for the old one's.
    command = ["carry", paths["new"], "--map", paths["map"], "--to", "new"]
    assert "expected vectors of dimension 24, got 32" in refused(command, 65, monkeypatch, capsys)


def test_nan_in_the_middle_stops_and_what_was_carried_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    paths: dict[str, str],
) -> None:  # fmt: skip
    folder = tmp_path / "s"
    write_parquet(folder / "a.parquet", MADE.ids, spoilt(MADE.old, 70, np.inf), 50)
    command = ["carry", str(folder), "--map", paths["map"], "--to", "new"]
    assert "in 'item-70'; correct or delete" in refused(command, 65, monkeypatch, capsys)
    assert [path.name for path in (folder / "_new").glob("*.parquet")] == ["a.0.parquet"]
    write_parquet(folder / "a.parquet", MADE.ids, MADE.old, 50)
    monkeypatch.setattr("sys.argv", ["nobackfill", *command])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    # A mended export is another file: all of it is carried anew.
    assert "120 vectors written now, 120 in the store" in capsys.readouterr().out


def test_tables_that_cannot_be_carried_get_a_sentence(
    postgres: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        for statement in (
            "CREATE TABLE keyless (id int, v vector(3))",
            "CREATE TABLE paired (a int, b int, v vector(3), PRIMARY KEY (a, b))",
            "CREATE TABLE two (id int PRIMARY KEY, v vector(3), w vector(3))",
            "CREATE TABLE none (id int PRIMARY KEY, t text)",
            "CREATE TABLE mixed (id int PRIMARY KEY, v vector)",
            "INSERT INTO mixed VALUES (1, '[1,2,3]'), (2, '[1,2]')",
        ):
            connection.execute(statement.encode())
        expected = {
            "keyless": (65, "expected a key of one column"),
            "paired": (65, "expected a key of one column"),
            "two": (65, "found v, w; name one with --vector"),
            "none": (65, "found none; to convert a column of numbers, run ALTER TABLE"),
            "absent": (
                66,
                "correct the name after # in SOURCE. Tables with vectors are keyless,",
            ),
        }
        for table, (code, words) in expected.items():
            said = refused(["inspect", f"{address}#{table}"], code, monkeypatch, capsys)
            assert words in said
        for table in ("keyless", "paired"):
            said = refused(["inspect", f"{address}#{table}"], 65, monkeypatch, capsys)
            advice = said.partition("or add one: ")[2].partition(", then ")
            connection.execute(advice[0].encode())
            line = ["nobackfill", "inspect", f"{address}#{table}", *advice[2].split()]
            run_command(main, line, monkeypatch)
        said = refused(["sample", f"{address}#mixed"], 65, monkeypatch, capsys)
        assert "got 3 in '1' and 2 in '2'" in said
        said = refused(["inspect", f"{address}#keyless", "--key", "nope"], 65, monkeypatch, capsys)
        assert "no column 'nope'; correct the name. The columns are " in said
    assert "the name of a table" in refused(["inspect", address], 65, monkeypatch, capsys)
    gone = refused(["inspect", f"{address}#keyless"], 66, monkeypatch, capsys)
    assert "does not exist; correct DATABASE of postgresql://" in gone
    nobody = "postgresql://127.0.0.1:1/db#t"
    said = refused(["inspect", nobody], 69, monkeypatch, capsys)
    assert "PostgreSQL reports" in said and "check that the server runs" in said


def test_a_key_may_be_named_and_a_locked_table_is_not_waited_for(postgres: Server) -> None:
    """Whatever type and name a key has; and who holds the table goes first."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            'CREATE TABLE "T" ("the ""key" uuid NOT NULL UNIQUE DEFAULT gen_random_uuid(), '
            '"v w" halfvec(3))'
        )
        connection.execute(
            """INSERT INTO "T" ("v w") SELECT '[1,2,3]' FROM generate_series(1, 25)"""
        )
        source = open_source(f"{address}#T", key='the "key')
        windows = list(source.windows(10))
        assert [len(source.read(window)) for window in windows] == [10, 10, 5]
        assert source.facts().dim == 3


def test_inspect_tells_what_is_wrong_and_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = world(600)
    vectors = many.old.copy()
    vectors[300:] += 0.5
    vectors[7] = vectors[5]
    vectors[9, 3] = np.nan
    vectors[11] = 0
    path = write_parquet(tmp_path / "s.parquet", many.ids, vectors)
    monkeypatch.setattr("sys.argv", ["nobackfill", "inspect", str(path)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert "take the sample from all rows" in said
    assert "600 vectors of dimension 24" in said
    assert "duplicates: 1" in said
    assert "NaN or infinity in 1 rows, only zeros in 1" in said
    drift = float(said.split("rows differ ")[1].split(" ")[0])
    assert drift > 20
    calm = write_parquet(tmp_path / "calm.parquet", many.ids, many.old)
    monkeypatch.setattr("sys.argv", ["nobackfill", "inspect", str(calm)])
    with pytest.raises(SystemExit):
        main()
    said = capsys.readouterr().out
    assert float(said.split("rows differ ")[1].split(" ")[0]) < 2 and "so no drift" in said


def test_a_sample_is_spread_seeded_and_as_large_as_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    # A crowd, and ten small far groups that chance would often miss.
    vectors = rng.normal(size=(1000, 8)).astype(np.float32)
    for group in range(10):
        vectors[group * 5 : group * 5 + 5] += 100 * (group + 1)
    ids = [str(row) for row in range(1000)]
    path = str(write_parquet(tmp_path / "s.parquet", ids, vectors))

    told: list[str] = []

    def drawn(*options: str) -> list[str]:
        monkeypatch.setattr("sys.argv", ["nobackfill", "sample", path, *options])
        with pytest.raises(SystemExit):
            main()
        said = capsys.readouterr()
        told.append(said.err)
        return said.out.split()

    found = drawn("-n", "160")
    assert len(set(found)) == 160
    assert {int(name) // 5 for name in found if int(name) < 50} == set(range(10))
    # By a slow look: of each item the nearest that was chosen.
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    nearest = (1 - unit @ unit[[int(name) for name in found]].T).min(1).mean()
    pattern = r"sample is ([\d.]+), and ([\d.]+) for a random"
    chosen, random = map(float, re.findall(pattern, told[0])[0])
    assert chosen == pytest.approx(nearest, abs=6e-4)
    assert 0.5 * random < chosen < 2 * random
    assert "made no map measurably better" in told[0]
    assert drawn("-n", "160") == found != drawn("-n", "160", "--seed", "1")
    assert drawn("-n", "1001") == ids == drawn()


@pytest.mark.parametrize(
    ("source", "code"), [("nothing.parquet", 66), ("odd://nothing", 65), ("", 65)]
)
def test_the_kinds_of_sources_are_told_in_one_line(
    source: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(["inspect", source], code, monkeypatch, capsys)
    assert "FILE.parquet" in said and "\\n" not in said


def test_a_folder_and_another_archive_are_no_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "ids.npy", np.array(["1"]))
    np.save(tmp_path / "vectors.npy", np.ones((1, 2), np.float32))
    anchors = np.ones((3, 2, 2), np.float32)
    save_rank_fusion(
        tmp_path / "joining.npz", FittedRankFusion(0.5, OddsLine(), OddsLine(), *anchors)
    )
    for name, code, found in (
        (".", 66, "expected a file, found a folder"),
        ("joining.npz", 65, "found a file without 'weight'; name the file"),
    ):
        words = ["carry", str(tmp_path), "--map", str(tmp_path / name), "--to", "new"]
        assert found in refused(words, code, monkeypatch, capsys)
    assert not (tmp_path / "new.npy").exists()


@pytest.mark.parametrize("count", [9, 11])
def test_an_array_of_another_length_than_the_ids_is_refused(tmp_path: Path, count: int) -> None:
    np.save(tmp_path / "ids.npy", np.arange(10))
    np.save(tmp_path / "vector.npy", MADE.old[:10])
    np.save(tmp_path / "title.npy", np.arange(count))
    np.save(tmp_path / "year.npy", np.array([*range(9), np.nan]))
    np.save(tmp_path / "day.npy", np.array(["2026-11-27"] * 9 + ["NaT"], "datetime64[D]"))
    source = ArraySource(tmp_path)
    with pytest.raises(
        InvalidInputError, match=rf"title\.npy: expected 10 values, .* got {count};"
    ):
        source.read_column(Window(0, 5), "title")
    assert source.read_column(Window(8, 10), "year").values == ["8.0", "nan"]
    assert source.read_column(Window(8, 10), "day").values == ["2026-11-27", "None"]
