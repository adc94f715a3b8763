"""A network beside an affine map: trained by who is named, judged and carried like the others."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.cli import main
from nobackfill.adopt.converters import map_to_onnx
from nobackfill.adopt.maps import (
    RESIDUAL_KIND,
    Map,
    fit_maps,
    load_map,
    open_trainer,
    save_map,
    train_residual,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.adopt.verdict import Cost, decide
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.ridge import Floats
from nobackfill.vectors import Vectors, normalise
from tests.adopt.made import write_parquet

OURS = "nobackfill.training.pairs:residual"


def folded(count: int, seed: int = 0) -> Pairs:
    """New vectors have the sizes of the old ones' numbers, which no linear map gives."""
    rng = np.random.default_rng(seed)
    old = rng.normal(size=(count, 8)).astype(np.float32)
    new = np.concatenate([old, np.abs(old)], 1)
    return Pairs([f"item-{row}" for row in range(count)], old, normalise(new))


def sizes(old: Vectors, new: Vectors, straight: Vectors) -> list[tuple[Floats, Floats]]:
    """What a trainer may give: |x| of x, and x itself, less what is there."""
    line = np.linalg.lstsq(np.c_[old, np.ones(len(old))], straight, rcond=None)[0]
    first = np.concatenate([np.eye(8), -np.eye(8)])
    last = np.zeros((16, 16))
    last[:8, :8], last[:8, 8:] = np.eye(8), -np.eye(8)
    last[8:, :8], last[8:, 8:] = np.eye(8), np.eye(8)
    last -= np.concatenate([line[:8], -line[:8]]).T
    return [(first, np.zeros(16)), (last, -line[8])]


def test_a_trained_map_is_written_read_and_run_elsewhere(tmp_path: Path) -> None:
    pairs = folded(300)
    straight = fit_maps(pairs.old, pairs.new)["affine"]
    found = train_residual(straight, pairs.old, pairs.new, sizes)
    np.testing.assert_allclose(found(pairs.old), pairs.new, atol=1e-4)
    save_map(tmp_path / "map.npz", found)
    again = load_map(tmp_path / "map.npz")
    assert (again.kind, again.digest, again.facts) == (RESIDUAL_KIND, found.digest, found.facts)
    assert found.digest != straight.digest
    np.testing.assert_array_equal(again(pairs.old), found(pairs.old))
    session = onnxruntime.InferenceSession(map_to_onnx(found))
    (run,) = session.run(None, {"embedding": pairs.old})
    np.testing.assert_allclose(run, found(pairs.old), atol=1e-5)


@pytest.mark.slow
def test_it_is_judged_out_of_fold_and_chosen_where_it_keeps_more() -> None:
    pairs = folded(200)
    found = decide(pairs, Cost(1_000_000, 0.01, 0.02, 1e-6), trainer=sizes)
    assert found.map.kind == RESIDUAL_KIND
    assert found.candidates[RESIDUAL_KIND] > 0.99 > found.candidates["affine"] + 0.2
    assert found.curve == []

    def learns_by_heart(
        old: Vectors, new: Vectors, straight: Vectors
    ) -> list[tuple[Floats, Floats]]:
        rng = np.random.default_rng(0)
        hidden = rng.normal(size=(250, 8))
        seen = np.maximum(old @ hidden.T, 0)
        return [
            (hidden, np.zeros(250)),
            (np.linalg.lstsq(seen, rng.normal(size=new.shape), rcond=None)[0].T, np.zeros(16)),
        ]

    found = decide(pairs, Cost(1_000_000, 0.01, 0.02, 1e-6), trainer=learns_by_heart)
    assert found.map.kind != RESIDUAL_KIND
    assert found.candidates[RESIDUAL_KIND] < found.candidates["affine"]


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        ([(np.ones((16, 9)), np.ones(16))], "reads 8 numbers"),
        ([(np.ones((4, 8)), np.ones(4))], "16 outputs"),
        ([], "16 outputs"),
        ([(np.ones((16, 8)), np.ones(15))], "bias"),
        ([(np.full((16, 8), np.nan), np.ones(16))], "weight"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers: list[tuple[Floats, Floats]], said: str) -> None:
    pairs = folded(40)
    straight = fit_maps(pairs.old, pairs.new)["affine"]
    with pytest.raises(InvalidInputError, match=said):
        train_residual(straight, pairs.old, pairs.new, lambda *_: layers)


@pytest.mark.long
@pytest.mark.slow
def test_who_cannot_train_is_named() -> None:
    for name in ("nobackfill.nowhere:residual", "nobackfill.training.pairs:nobody", "residual"):
        with pytest.raises(NotFoundError, match="cannot be imported"):
            open_trainer(name)
    with pytest.raises(InvalidInputError, match="expected a function"):
        open_trainer("nobackfill.adopt.maps:RESIDUAL_KIND")


@pytest.mark.long
@pytest.mark.slow
def test_ours_follows_what_no_line_does_and_adds_nothing_to_what_one_does() -> None:
    trainer = open_trainer(OURS)
    pairs, others = folded(600), folded(300, seed=1)
    straight = fit_maps(pairs.old, pairs.new)["affine"]

    def error(one: Map, new: Vectors) -> float:
        return float(np.square(one(others.old) - new).sum(1).mean())

    found = train_residual(straight, pairs.old, pairs.new, trainer)
    assert error(found, others.new) < 0.7 * error(straight, others.new)
    turned = np.linalg.qr(np.random.default_rng(2).normal(size=(8, 8)))[0].astype(np.float32)
    noise = 0.5 * np.random.default_rng(3).normal(size=(200, 8)).astype(np.float32)
    new = pairs.old[:200] @ turned + noise
    straight = fit_maps(pairs.old[:200], new)["affine"]
    found = train_residual(straight, pairs.old[:200], new, trainer)
    truth = others.old @ turned
    assert error(found, truth) < 1.2 * error(straight, truth) + 0.01


def test_fit_and_carry_by_a_trained_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    every, some = folded(500), slice(0, 300)
    old = write_parquet(tmp_path / "old.parquet", every.ids, every.old)
    new = write_parquet(tmp_path / "new.parquet", every.ids[some], every.new[some])
    file = tmp_path / "map.npz"
    words = [
        "fit",
        "--old",
        old,
        "--new",
        new,
        "--out",
        file,
        "--also",
        f"{__name__}:sizes",
        "--json",
    ]
    monkeypatch.setattr("sys.argv", ["nobackfill", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    told = json.loads(capsys.readouterr().out)
    assert told["chosen"] == RESIDUAL_KIND
    mapping = load_map(file)
    source = open_source(str(old))
    target = Target("new", 16, mapping.digest)
    assert carry(source, target, mapping).write_count == 500
    rows: dict[str, list[float]] = {}
    for path in set(tmp_path.rglob("*.parquet")) - {old, new}:
        part = pq.read_table(path).to_pydict()
        rows |= dict(zip(part["id"], part["new"], strict=True))
    carried = np.array([rows[one] for one in every.ids], np.float32)
    np.testing.assert_allclose(carried, mapping(every.old), atol=1e-5)
