"""Vectors know the model that made them: the same dimension is not the same space."""

from pathlib import Path

import pyarrow as pa
import pytest

from nobackfill.adopt.cli.app import main
from nobackfill.adopt.maps import load_map
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import MODEL, table_bytes
from nobackfill.errors import IncompatibleSpaceError
from nobackfill.serve import Dual
from nobackfill.vectors import Vectors
from tests.adopt.made import world
from tests.adopt.test_refusals import refused
from tests.serve.shop import NewModel, loaded
from tests.support.documents import run_command

MADE = world(120)


def written(path: Path, vectors: Vectors, model: str, rows: list[int] | None = None) -> str:
    path.parent.mkdir(exist_ok=True)
    ids = pa.array([f"item-{row}" for row in rows or range(len(vectors))])
    path.write_bytes(table_bytes("id", ids, "vector", vectors, {MODEL: model.encode()}))
    return str(path)


def test_models_are_named_from_the_pairs_to_what_is_carried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    answers = MADE.answers.tolist()
    old = written(tmp_path / "old.parquet", MADE.old, "old model")
    new = written(tmp_path / "new.parquet", MADE.new, "new model")
    asked_old = written(tmp_path / "qo.parquet", MADE.queries_old, "old model", answers)
    asked_new = written(tmp_path / "qn.parquet", MADE.queries_new, "new model", answers)
    other = written(tmp_path / "other.parquet", MADE.queries_new, "another model", answers)
    fit = ["fit", "--old", old, "--new", new, "--queries-old", asked_old, "--queries-new"]
    assert "one model" in refused([*fit, other], 65, monkeypatch, capsys)
    run_command(main, ["nobackfill", *fit, asked_new, "--joining", "j.npz"], monkeypatch)
    mapping = load_map(tmp_path / "map.npz")
    assert mapping.facts["old_model"] == "old model"
    assert mapping.facts["new_model"] == "new model"
    carry = ["--map", "map.npz", "--to", "carried"]
    stranger = written(tmp_path / "stranger.parquet", MADE.old, "a third model")
    assert "one model" in refused(["carry", stranger, *carry], 65, monkeypatch, capsys)
    run_command(main, ["nobackfill", "carry", old, *carry], monkeypatch)
    assert open_source(str(tmp_path / "_old.carried")).facts().model == "new model"
    (tmp_path / "shop").mkdir()
    with pytest.raises(IncompatibleSpaceError, match="not the same space"):
        Dual.open(
            loaded(tmp_path / "shop"), Path("map.npz"), Path("j.npz"), Path("n.db"),
            NewModel(fingerprint="another model"),
        )  # fmt: skip
