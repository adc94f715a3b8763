"""Rows in settings of their own: other domains, classes that share nothing, chains of updates."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from nobackfill.class_folders import list_images
from nobackfill.metrics.distances import to_unit_norm
from nobackfill.metrics.retrieval import mean_of_answerable, search_and_score
from nobackfill.research.catalogue import PAIRS, list_rows
from nobackfill.research.cells import Evaluation, read_cells
from nobackfill.research.images import (
    SHIFTS,
    link_train_and_test,
    write_digits,
    write_shifted_images,
)
from nobackfill.research.presets import DIGITS
from nobackfill.research.results import Provenance
from nobackfill.research.rows import ComparisonPlace, TrainingRun
from nobackfill.research.serve import measure_costs
from nobackfill.research.summary import MeasuredRow, summarise
from nobackfill.research.tasks import row_images, run_tasks
from nobackfill.training.data.allocations import allocate_images
from nobackfill.training.loop.run import CHECKPOINT, read_finished

SHORT = {
    "embedder": {"epochs": 2, "batch_size": 16},
    "side_encoder": {"epochs": 3, "batch_size": 16},
    "upgrade": {"epochs": 3, "batch_size": 32, "views": 2},
}

MADE = Provenance(command="", machine="", configured="")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> ComparisonPlace:
    """The digits' main split, its runs short."""
    folder = tmp_path_factory.mktemp("place")
    write_digits(folder / "digits")
    # A tenth is tested, and a tenth of the rest trains: enough to see what is connected to what.
    link_train_and_test(folder / "digits", folder / "few", 0.2, 0)
    link_train_and_test(folder / "few" / "test", folder / "data", 0.4, 0)
    return ComparisonPlace(DIGITS, DIGITS.splits[0], 0, folder / "data", folder / "runs", SHORT)


def slow_mean(image: np.ndarray) -> np.ndarray:
    """Each pixel the mean of the 3 x 3 around it, edges repeated."""
    height, width, channels = image.shape
    out = np.empty(image.shape)
    for y in range(height):
        for x in range(width):
            for c in range(channels):
                total = 0.0
                for dy in (-1, 0, 1):
                    for dx in (-1, 0, 1):
                        near_y = min(max(y + dy, 0), height - 1)
                        near_x = min(max(x + dx, 0), width - 1)
                        total += image[near_y, near_x, c]
                out[y, x, c] = total / 9
    return out


def test_a_shift_is_what_it_says(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3)).astype(np.uint8)
    test = tmp_path / "test" / "ant"
    test.mkdir(parents=True)
    Image.fromarray(pixels).save(test / "0.png")
    shifted = {}
    for name in SHIFTS:
        write_shifted_images(tmp_path / "test", tmp_path / name)
        assert list_images(tmp_path / name).paths == ("ant/0.png",)
        shifted[name] = np.asarray(Image.open(tmp_path / name / "ant" / "0.png")).astype(int)
    assert np.array_equal(shifted["negative"], 255 - pixels.astype(int))
    assert np.abs(shifted["blurred"] - slow_mean(pixels)).max() <= 1


def test_models_meet_images_of_a_domain_that_they_did_not_train_on(place: ComparisonPlace) -> None:
    rows = {row.name: row for row in list_rows(place, ("foreign", "independent"))}
    run_tasks([(place, [rows["independent"], rows["negative:independent"]])], 1)
    plain, shifted = (
        read_cells(place.runs_folder / "cells" / f"{name}.npz")
        for name in ("independent", "negative-independent")
    )
    assert plain is not None and shifted is not None
    # The same models and labels, other pixels.
    assert rows["negative:independent"].runs == rows["independent"].runs
    assert not np.array_equal(
        plain.figures_by_query["new/new"]["map"], shifted.figures_by_query["new/new"]["map"]
    )
    assert len(plain.figures_by_query["new/new"]["map"]) == len(
        shifted.figures_by_query["new/new"]["map"]
    )
    trained = {run.config_values["images"] for row in rows.values() for run in row.runs}
    assert trained == {place.images_folder / "train"}


def test_disjoint_objectives_share_no_class(place: ComparisonPlace) -> None:
    row = next(iter(list_rows(place, ("disjoint:fct_simclr",))))
    run_tasks([(place, [row])], 1)
    assert row.side_run is not None
    old, side, new, upgrade = (
        set(read_finished(run.folder).class_names)
        for run in (row.old_run, row.side_run, row.new_run, row.upgrade_runs[0])
    )
    tested = set(row_images(place, row).class_names)
    assert old == side == set("01234") and new == upgrade == tested == set("56789")
    cells = read_cells(place.runs_folder / "cells" / "disjoint-fct_simclr.npz")
    assert cells is not None
    assert len(cells.figures_by_query["new/served"]["map"]) == len(row_images(place, row))


def test_lwf_of_the_paper_learns_new_classes_and_knows_the_old_ones_by_soft_labels(
    place: ComparisonPlace,
) -> None:
    (row,) = list_rows(place, ("lwf_new_data",))
    run_tasks([(place, [row])], 1)
    assert set(read_finished(row.new_run.folder).class_names) == set("56789")
    assert row.new_run.config_values["old"] == row.old_run.folder
    assert set(row_images(place, row).labels) == set(range(10))


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS)
def test_models_of_two_architectures_are_compared(place: ComparisonPlace, pair: str) -> None:
    rows = {row.name: row for row in list_rows(place, ("architectures",))}
    row = rows[f"{pair}:affine_simclr"]
    run_tasks([(place, [row])], 1)
    trained = [read_finished(run.folder).config for run in (row.old_run, row.new_run)]
    assert tuple(config.model_dump()["backbone"] for config in trained) == PAIRS[pair]
    cells = read_cells(place.runs_folder / "cells" / f"{pair}-affine_simclr.npz")
    assert cells is not None
    # What was carried is nearer to the new space than two networks are.
    figures = {
        cell: mean_of_answerable(cells.figures_by_query[cell]["map"])
        for cell in ("new/old", "new/served")
    }
    assert figures["new/old"] < figures["new/served"]
    # All rows of a pair have one old model, and rivals start alike.
    olds = {other.old_run.folder for name, other in rows.items() if name.startswith(f"{pair}:")}
    assert olds == {row.old_run.folder}


def test_a_long_chain_hands_each_model_and_side_information_on(place: ComparisonPlace) -> None:
    rows = {row.name: row for row in list_rows(place, ("long_chain",))}
    longest, none = rows["long_chain:5"], rows["long_chain_none:5"]

    def of(run: TrainingRun, key: str) -> object:
        return run.config_values.get(key)

    assert [of(hop, "classes") for hop in longest.upgrade_runs] == [6, 7, 8, 9, 10]
    for before, after in zip(longest.upgrade_runs, longest.upgrade_runs[1:], strict=False):
        assert of(before, "new") == of(after, "old")
        assert of(before, "new_side") == of(after, "old_side") is not None
    assert all(of(hop, "old_side") is of(hop, "new_side") is None for hop in none.upgrade_runs)
    assert of(longest.upgrade_runs[0], "old") == longest.old_run.folder
    assert of(longest.upgrade_runs[-1], "new") == longest.new_run.folder
    # Five models and five different starts, so that neighbours are not alike by their seed.
    models = {
        run.folder: run.config_values["seed"]
        for row in rows.values()
        for run in (row.old_run, row.new_run)
    }
    assert len(models) == len(set(models.values())) == 6
    for length in range(1, 6):
        assert rows[f"long_chain:{length}"].upgrade_runs == longest.upgrade_runs[:length]


@pytest.mark.long
def test_a_chain_of_two_is_measured(place: ComparisonPlace) -> None:
    rows = {row.name: row for row in list_rows(place, ("long_chain",))}
    run_tasks([(place, [rows["long_chain:2"]])], 1)
    cells = read_cells(place.runs_folder / "cells" / "long_chain-2.npz")
    assert cells is not None and "served/served" in cells.figures_by_query
    assert read_finished(rows["long_chain:2"].upgrade_runs[0].folder).facts["new_side_dim"] == 32


def test_hops_of_a_chain_are_rows_of_their_own(place: ComparisonPlace) -> None:
    """FCT Tables 5 and 8 print v1 -> v2 and v2 -> v3, whose trainings the chain has."""
    rows = {row.name: row for row in list_rows(place, ("chains",))}
    for end in ("", "_none"):
        first, second = rows[f"first_hop{end}"], rows[f"second_hop{end}"]
        chain = rows[f"two_hop{end}"]
        assert (*first.upgrade_runs, *second.upgrade_runs) == chain.upgrade_runs
        assert (first.old_run, second.new_run) == (chain.old_run, chain.new_run)
        assert first.new_run == second.old_run
        assert [run.config_values["old"] for run in second.upgrade_runs] == [first.new_run.folder]
        assert (first.side_run, second.side_run is None) == (chain.side_run, bool(end))


def slow_psi(run: TrainingRun, embedding: np.ndarray) -> np.ndarray:
    """DMU's [fc-bn-relu] x 3 and fc as kept with its model, normalised, in plain numpy."""
    kept = load_file(run.folder / CHECKPOINT)

    def part(layer: int, name: str) -> np.ndarray:
        tensor: np.ndarray = kept[f"upgrade.h.layers.{layer}.{name}"]
        return tensor

    for fc in (0, 3, 6):
        hidden = embedding @ part(fc, "weight").T + part(fc, "bias")
        mean, variance = part(fc + 1, "running_mean"), part(fc + 1, "running_var")
        scaled = (hidden - mean) / np.sqrt(variance + 1e-5)
        embedding = np.maximum(scaled * part(fc + 1, "weight") + part(fc + 1, "bias"), 0)
    embedding = embedding @ part(9, "weight").T + part(9, "bias")
    return to_unit_norm(embedding)


@pytest.mark.long
def test_dmus_gallery_evolves_with_each_update_in_a_row(place: ComparisonPlace) -> None:
    """phi_1's gallery through psi_2 and psi_3 (DMU Figure 3); BCT's stays as it is."""
    (dmu,), (bct,) = list_rows(place, ("dmu_chain",)), list_rows(place, ("bct_chain",))
    run_tasks([(place, [dmu, bct])], 1)
    test = Evaluation(row_images(place, dmu), place.preset.metric, place.runs_folder / "features")
    old, new = (test.features(run.folder, "embedder") for run in (dmu.old_run, dmu.new_run))
    second, third = dmu.upgrade_runs
    served = slow_psi(third, slow_psi(second, old))
    found = read_cells(place.runs_folder / "cells" / "dmu_chain.npz")
    kept = read_cells(place.runs_folder / "cells" / "bct_chain.npz")
    assert found is not None and kept is not None
    # By the mean: what is nearly as near as another may change places with it.
    expected = mean_of_answerable(search_and_score(new, served, test.relevance, test.metric)["map"])
    assert mean_of_answerable(found.figures_by_query["new/served"]["map"]) == pytest.approx(
        expected, abs=1e-3
    )
    assert abs(mean_of_answerable(found.figures_by_query["new/old"]["map"]) - expected) > 0.01
    np.testing.assert_array_equal(
        kept.figures_by_query["new/served"]["map"], kept.figures_by_query["new/old"]["map"]
    )
    steps = measure_costs([dmu, bct])
    assert steps["dmu_chain"].microseconds > 0 == steps["bct_chain"].microseconds


def test_growing_data_are_nested_and_train_in_a_row(place: ComparisonPlace) -> None:
    """DMU Table 6: 25, 50 and 75 % of each class, phi_1's gallery through psi_2 and psi_3."""
    rows = {row.name: row for row in list_rows(place, ("ablations",)) if "growing" in row.name}
    assert set(rows) == {
        f"growing-{share}:{method}"
        for share in (50, 75)
        for method in ("independent", "bct_sys", "dmu")
    }
    dmu, alone = rows["growing-75:dmu"], rows["growing-75:independent"]
    run_tasks([(place, [dmu, alone])], 1)
    second, third = dmu.upgrade_runs
    assert second == rows["growing-50:dmu"].new_run and third == dmu.new_run
    assert (second.config_values["old"], third.config_values["old"]) == (
        dmu.old_run.folder,
        second.folder,
    )
    assert (
        "old" not in alone.new_run.config_values
        and alone.new_run.config_values["seed"] == third.config_values["seed"]
    )
    whole = list_images(place.images_folder / "train")
    names: list[set[str]] = []
    for run, share in ((dmu.old_run, 0.25), (second, 0.5), (third, 0.75)):
        assert isinstance(run.config_values["images"], Path)
        listing = list_images(run.config_values["images"])
        assert listing.class_names == whole.class_names
        for label in range(10):
            expected = share * np.sum(whole.labels == label)
            assert abs(np.sum(listing.labels == label) - expected) <= 0.5
        names.append({Path(path).name for path in listing.paths})
    assert names[0] < names[1] < names[2]
    test = Evaluation(row_images(place, dmu), place.preset.metric, place.runs_folder / "features")
    old, new = (test.features(run.folder, "embedder") for run in (dmu.old_run, dmu.new_run))
    served = slow_psi(third, slow_psi(second, old))
    found = read_cells(place.runs_folder / "cells" / "growing-75-dmu.npz")
    assert found is not None
    expected = mean_of_answerable(search_and_score(new, served, test.relevance, test.metric)["map"])
    assert mean_of_answerable(found.figures_by_query["new/served"]["map"]) == pytest.approx(
        expected, abs=1e-3
    )


def test_rows_of_other_seeds_share_no_start(place: ComparisonPlace) -> None:
    def seeds(number: int) -> set[object]:
        here = replace(place, seed=number)
        return {
            run.config_values["seed"]
            for row in list_rows(here, ("long_chain",))
            for run in row.runs
        }

    assert seeds(0).isdisjoint(seeds(1))


def test_rivals_of_more_copies_take_as_many_steps(place: ComparisonPlace) -> None:
    """Digits 0-9 of which 5 are new: 4 copies of half of the images are 2.5 epochs' worth."""
    plain, copied = list_rows(
        replace(place, config_changes={}), ("fct_simclr", "fct_simclr_upweighted")
    )
    assert plain.upgrade_runs[0].config_values["epochs"] == 40
    values = copied.upgrade_runs[0].config_values
    assert (values["epochs"], values["unseen_copies"]) == (16, 4)
    assert values["warmup_epochs"] == pytest.approx(2 / 2.5)


def test_every_allocation_takes_the_steps_of_all_images(place: ComparisonPlace) -> None:
    whole = list_images(place.images_folder / "train")
    rows = {row.name: row for row in list_rows(replace(place, config_changes={}), ("allocations",))}
    assert len(rows) == 25
    epochs = DIGITS.embedder["epochs"]
    assert isinstance(epochs, int)
    for name, row in rows.items():
        allocation = allocate_images(name.split(":")[0], whole.labels, seed=place.seed)
        for run, images in ((row.old_run, allocation.old_rows), (row.new_run, allocation.new_rows)):
            own = run.config_values["epochs"]
            assert isinstance(own, int)
            # Images seen in all; classes and shares come in whole numbers.
            assert own * len(images) == pytest.approx(epochs * len(whole), rel=0.1), name


@pytest.mark.long
def test_a_limit_saw_what_is_tested_and_is_ranked_with_nobody(
    place: ComparisonPlace, tmp_path: Path
) -> None:
    """On classes that no other row trains on: their own tested items, or other images of them."""
    unseen = replace(place, split=DIGITS.splits[1], runs_folder=tmp_path / "runs")
    rows = {row.name: row for row in list_rows(unseen, ("affine_simclr", "limits"))}
    own, other = rows["limit:affine_simclr"], rows["limit:residual_simclr"]
    run_tasks([(unseen, [*rows.values()])], 1)
    tested = {Path(path).name for path in row_images(unseen, own).paths}
    learning_of = {}
    for name, row in (("own", own), ("other", other)):
        images = row.upgrade_runs[0].config_values["images"]
        assert isinstance(images, Path)
        listing = list_images(images)
        assert listing.class_names == ("7", "8", "9")
        learning_of[name] = {path.split("__")[-1] for path in listing.paths}
    assert learning_of["own"] == {name.split("__")[-1] for name in tested}
    assert learning_of["other"].isdisjoint(learning_of["own"])
    cells = {
        name: read_cells(unseen.runs_folder / "cells" / f"{name.replace(':', '-')}.npz")
        for name in rows
    }
    measured = {name: MeasuredRow(rows[name], [cell]) for name, cell in cells.items() if cell}
    found = summarise("few", "cosine", (0,), MADE, {"main": measured}, (), {}).main.rows
    assert [name for name, row in found.items() if row.shared] == ["affine_simclr"]
    # What it is held to is what every row is held to.
    assert found[own.name].held_to == found["affine_simclr"].held_to
    reached = {name: row.cells["new/served"]["map"][0] for name, row in found.items()}
    assert reached[own.name] > reached["affine_simclr"]
