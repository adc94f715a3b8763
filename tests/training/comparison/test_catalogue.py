"""The catalogue: which rows there are, what they train and in which order, what they claim."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError
from nobackfill.training.cli.compare import compare
from nobackfill.training.comparison.catalogue import GROUPS, rows_of
from nobackfill.training.comparison.cells import Cells
from nobackfill.training.comparison.claims import CLAIMS, Claim, judge
from nobackfill.training.comparison.names import Name
from nobackfill.training.comparison.presets import (
    CIFAR100,
    CIFAR100_CPU,
    DIGITS,
    PRESETS,
    folder_preset,
    preset_named,
)
from nobackfill.training.comparison.recipe import Place
from nobackfill.training.comparison.results import MAIN
from nobackfill.training.comparison.rows import independent_of
from nobackfill.training.comparison.scheduler import tasks
from nobackfill.training.config_file import parse_config


def place(tmp_path: Path, split: int = 0) -> Place:
    return Place(DIGITS, DIGITS.splits[split], 0, tmp_path / "data", tmp_path / "runs")


def test_every_row_is_a_configuration_that_training_accepts(tmp_path: Path) -> None:
    for preset in PRESETS.values():
        for split in preset.splits:
            here = Place(preset, split, 0, tmp_path / "data", tmp_path / "runs")
            wanted = preset.groups if preset is not DIGITS else tuple(GROUPS)
            folders: dict[Path, object] = {}
            for row in rows_of(here, wanted):
                for run in row.runs:
                    parse_config(dict(run.values), str(run.folder))
                    # One folder, one configuration.
                    assert folders.setdefault(run.folder, run.values) == run.values


def test_a_run_comes_after_all_that_it_reads(tmp_path: Path) -> None:
    here = place(tmp_path)
    seen: set[Path] = set()
    for task in tasks([(here, rows_of(here, tuple(GROUPS)))]):
        assert task.needs <= seen
        if task.made is not None:
            assert task.made not in seen
            seen.add(task.made)
    assert len(seen) > 60


def test_rivals_start_from_the_same_seed_and_seeds_differ(tmp_path: Path) -> None:
    rows = {row.name: row for row in rows_of(place(tmp_path), tuple(GROUPS))}
    assert rows["bct"].new.values["seed"] == rows["independent"].new.values["seed"]
    assert rows["bct"].old == rows["dmu"].old == rows["fct_simclr"].old
    other = replace(place(tmp_path), seed=1)
    seeds = {row.new.values["seed"] for row in rows_of(other, ("bct_family",))}
    assert seeds.isdisjoint({row.new.values["seed"] for row in rows.values()})


@pytest.mark.parametrize("kind", ["alternate", "mixup"])
def test_an_alternate_old_model_is_the_old_one_but_for_its_seed(tmp_path: Path, kind: str) -> None:
    here = place(tmp_path)
    old = dict(here.embedder("old", classes=5, role="old").values)
    alternate = dict(here.side_encoder("side", classes=5, kind=kind).values)
    assert alternate.pop("side_info_dim") == old.pop("embedding_dim")
    different = {key for key in old | alternate if old.get(key) != alternate.get(key)}
    assert different == {"kind", "run_dir", "seed", "side_info"}


def test_multi_crop_is_a_row_where_the_presets_own_simclr_has_none(tmp_path: Path) -> None:
    crops = rows_of(place(tmp_path), ["fct_multicrop"])[0].side
    plain = rows_of(place(tmp_path), ["fct_simclr"])[0].side
    assert crops is not None and plain is not None
    changed = {key for key in crops.values if crops.values[key] != plain.values.get(key)}
    assert changed == {"run_dir", "small_crops"}
    with pytest.raises(ConfigurationError, match="fct_multicrop"):
        rows_of(replace(place(tmp_path), preset=PRESETS["cifar100"]), ["fct_multicrop"])


def test_new_models_go_on_from_one_shared_warm_up(tmp_path: Path) -> None:
    split = CIFAR100_CPU.splits[0]
    here = Place(CIFAR100_CPU, split, 0, tmp_path / "data", tmp_path / "runs")
    rows = rows_of(here, ("core",))
    new = {row.new.folder: row.new for row in rows}
    assert {folder.name for folder in new} == {"new", "bct", "bct_sys", "unibct", "dmu"}
    assert len({run.values["init"] for run in new.values()}) == 1
    assert {run.values["epochs"] for run in new.values()} == {5}
    # The old model has nothing to share.
    assert "init" not in rows[0].old.values and rows[0].old.values["epochs"] == 8
    assert "init" not in rows_of(place(tmp_path), ("bct",))[0].new.values


def test_claims_name_rows_that_exist(tmp_path: Path) -> None:
    names = {row.name for row in rows_of(place(tmp_path), tuple(GROUPS))}
    for claim in CLAIMS:
        assert {claim.better[0], claim.worse[0]} <= names, claim.text
    assert len({claim.text for claim in CLAIMS}) == len(CLAIMS)
    # No name outlives its row.
    assert set(Name) <= names | {part for name in names for part in name.split(":")}


def test_a_claim_is_judged_over_paired_seeds() -> None:
    rng = np.random.default_rng(0)
    base = [rng.random(200) for _ in range(3)]

    def row(gain: float) -> list[Cells]:
        return [Cells({"new/old": {"map": values + gain}}, {}) for values in base]

    rows = {"a": row(0.01), "b": row(0.0)}
    claims = [
        Claim("a > b", ("a", "new/old"), ("b", "new/old")),
        Claim("b > a", ("b", "new/old"), ("a", "new/old")),
        Claim("a > c", ("a", "new/old"), ("c", "new/old")),
        Claim("a's other cell", ("a", "new/new"), ("b", "new/old")),
    ]
    judged = judge(claims, rows)
    assert set(judged) == {"a > b", "b > a"}
    assert judged["a > b"].verdict == "holds" and judged["b > a"].verdict == "fails"


@pytest.mark.parametrize(
    ("gains", "strict", "or_equal"),
    [
        ((0.01, 0.02), "holds", "holds"),
        ((0.0, 0.0), "fails", "holds"),
        ((0.0, 0.01), "undecided", "holds"),
        ((-0.01, 0.01), "undecided", "undecided"),
        ((-0.01, 0.0), "fails", "undecided"),
        ((-0.01, -0.02), "fails", "fails"),
    ],
)
def test_a_tie_keeps_a_claim_of_at_least_as_good(
    gains: tuple[float, ...], strict: str, or_equal: str
) -> None:
    """Seeds that gain each as much on every query: the interval ends at the least and the most."""
    base = np.random.default_rng(0).random(50)
    rows = {
        "a": [Cells({"new/old": {"map": base + gain}}, {}) for gain in gains],
        "b": [Cells({"new/old": {"map": base}}, {}) for _ in gains],
    }
    ends = ("a", "new/old"), ("b", "new/old")
    claims = [Claim("a > b", *ends), Claim("a >= b", *ends, or_equal=True)]
    judged = judge(claims, rows)
    assert (judged["a > b"].verdict, judged["a >= b"].verdict) == (strict, or_equal)


def test_rows_are_held_to_a_model_trained_alone_on_the_same_images(tmp_path: Path) -> None:
    rows = rows_of(place(tmp_path), tuple(GROUPS))
    held_to = {row.name: independent_of(row, rows) for row in rows}
    assert held_to["bct"] == held_to["dmu_chain"] == held_to["bct_wide"] == "independent"
    assert held_to["fct_simclr"] == "fct_simclr"
    assert held_to["open-class:vanilla"] == "open-class:independent"
    # No model was trained alone on the wrong labels.
    assert held_to["noisy_unibct"] is None
    by_name = {row.name: row for row in rows}
    assert independent_of(by_name["bct"], [by_name["bct"], by_name["dmu"]]) is None


def test_presets_are_the_protocols_they_say(tmp_path: Path) -> None:
    assert CIFAR100.embedder["backbone"] == "resnet50" and CIFAR100.embedder["embedding_dim"] == 128
    assert (CIFAR100.upgrade["epochs"], CIFAR100.upgrade["inner_dim"]) == (80, 2048)
    assert {split.name: (split.old, split.new) for split in CIFAR100_CPU.splits} == {
        "main": (50, 100),
        "unseen": (40, 80),
    }
    unseen = DIGITS.splits[1]
    assert (unseen.old, unseen.new, unseen.tested_first, unseen.tested_end) == (3, 7, 7, 10)
    photos = folder_preset(20)
    assert photos.splits[0].old == 10 and photos.splits[1].tested_first == 16


# Of what each row's trainings are configured with; bench/results/compare-*.json hold their figures.
MEASURED = {
    "digits": "98c9f0fa8e2857b054f17a064e89d98b2b8c558bc266bb6feffef99cc09854e2",
    "cifar100-cpu": "bda351d3db5acc7c5527bd8238f83bea2a2bfbcbc153443d17459ffbb9de305d",
}


@pytest.mark.parametrize("name", MEASURED)
def test_configurations_are_those_that_were_measured(name: str) -> None:
    """A change of a hyper-parameter wants the tables measured anew, then the digest here."""
    preset, trained = PRESETS[name], {}
    for split in preset.splits:
        here = Place(preset, split, 0, Path("data", split.name), Path("runs", split.name))
        for row in rows_of(here, preset.groups if split.name == MAIN else preset.unseen_groups):
            for run in row.runs:
                config = parse_config(dict(run.values), name)
                trained[run.folder] = config.model_dump(mode="json", exclude_unset=True)
    content = json.dumps([trained[folder] for folder in sorted(trained)], sort_keys=True)
    assert hashlib.sha256(content.encode()).hexdigest() == MEASURED[name]


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="unknown method 'bcd'; groups: core"):
        rows_of(place(tmp_path), ("bcd",))
    with pytest.raises(ConfigurationError, match="unknown data 'mnist'; known: digits"):
        preset_named("mnist")
    with pytest.raises(ConfigurationError, match="needs --images"):
        compare(CIFAR100_CPU, None, tmp_path, [0], ("core",), 1)
    with pytest.raises(ConfigurationError, match="no image folder"):
        compare(CIFAR100_CPU, tmp_path / "none", tmp_path, [0], ("core",), 1)
    with pytest.raises(InvalidInputError, match="at least 10 class folders"):
        folder_preset(9)
