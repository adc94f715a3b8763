"""`compare.py --data` of the papers' data sets in small: digits in the layouts of their makers."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.class_folders import list_images
from nobackfill.errors import InvalidInputError
from nobackfill.research import compare as command
from nobackfill.research.catalogue import list_rows
from nobackfill.research.compare import compare, summarise_by_protocols, train_and_measure
from nobackfill.research.presets import (
    GLDV2,
    IJBC,
    IMAGENET,
    MARKET1501,
    MS1MV3,
    PLACES365,
    PRESETS,
    VGGFACE2,
    Preset,
    Split,
)
from nobackfill.research.protocols import PAPER_TABLES, ProtocolRow, write_protocols
from nobackfill.research.results import Figure
from nobackfill.research.rows import ComparisonPlace, TrainingRun, upper_bound_key
from nobackfill.training.config import load_config, parse_config
from nobackfill.training.data.pictures import ListedImages, ReadingOptions
from nobackfill.training.loop.run import CONFIG, read_finished
from nobackfill.training.networks.frozen import cached_features, encoder_of_run
from tests.training.life import Life, invoke
from tests.training.protocols.test_evaluation import WRITERS

# The networks, pixels and lengths of seconds on a CPU; every other key is that of the data set.
CPU: dict[str, dict[str, object]] = {
    "embedder": {
        "backbone": "small", "width": 8, "image_size": 8, "pixel_cache": None,
        "embedding_dim": 16, "epochs": 3, "warmup_epochs": 1, "batch_size": 32, "lr": 0.05,
        "lr_steps": (), "precision": "32-true",
    },
    "side_encoder": {
        "backbone": "small", "width": 8, "image_size": 8, "pixel_cache": None, "side_info_dim": 16,
        "small_crops": 0, "epochs": 1, "warmup_epochs": 0, "batch_size": 32, "lr": 0.1,
        "precision": "32-true",
    },
    "upgrade": {
        "pixel_cache": None, "projection_dim": 16, "inner_dim": 32, "epochs": 2,
        "warmup_epochs": 1, "batch_size": 32, "views": 2, "mixed_views": 0,
    },
}  # fmt: skip
SMALL = Split("main", 3, 6, 0, 6, chain_class_counts=(2, 3))


def life_of(digits: Path) -> Life:
    """The images alone, which the writers of protocols read; nothing is published."""
    return Life(digits, digits, digits)


def link(digits: Path, part: str, to: Path, classes: range = range(6), name: str = "{}") -> None:
    to.mkdir(parents=True)
    for digit in classes:
        (to / name.format(digit)).symlink_to(digits / part / str(digit))


def imagenet(digits: Path, root: Path) -> None:
    link(digits, "train", root / "train", name="n0000000{}")
    link(digits, "gallery", root / "val", name="n0000000{}")


def places365(digits: Path, root: Path) -> None:
    link(digits, "train", root / "train")
    link(digits, "gallery", root / "val")
    link(digits, "eval", root / "imagenet" / "train", range(4, 10))


def vggface2(digits: Path, root: Path) -> None:
    """The tested subjects are others; each has more than 50 images."""
    link(digits, "train", root / "train", name="n00000{}")
    link(digits, "eval", root / "test", range(7, 10), name="n00000{}")


def faces(digits: Path, root: Path) -> None:
    link(digits, "train", root / "train", name="person{}")
    WRITERS["ijbc"](life_of(digits), root)


def gldv2(digits: Path, root: Path) -> None:
    """Train ids, too, lie by their first three characters; one of two more test sets is there."""
    WRITERS["gldv2"](life_of(digits), root)
    WRITERS["roxford5k"](life_of(digits), root / "roxford5k")
    rows = []
    for digit in range(6):
        names = []
        for image in sorted((digits / "train" / str(digit)).iterdir()):
            names.append(f"abc{digit}{image.stem}")
            link_to = root / "train" / "a" / "b" / "c" / f"{names[-1]}.jpg"
            link_to.parent.mkdir(parents=True, exist_ok=True)
            link_to.symlink_to(image)
        rows.append(f"{100 * digit + 7},{' '.join(names)}")
    (root / "train" / "train_clean.csv").write_text("\n".join(["landmark_id,images", *rows]))


def market1501(digits: Path, root: Path) -> None:
    WRITERS["market1501"](life_of(digits), root)
    (root / "bounding_box_train").mkdir()
    for digit in range(6):
        for number, image in enumerate(sorted((digits / "train" / str(digit)).iterdir())):
            name = f"{digit + 20:04d}_c{1 + number % 6}s1_{number:06d}_01.jpg"
            (root / "bounding_box_train" / name).symlink_to(image)


LAYOUTS: Mapping[str, tuple[Preset, Callable[[Path, Path], None]]] = {
    "imagenet": (IMAGENET, imagenet),
    "places365": (PLACES365, places365),
    "vggface2": (VGGFACE2, vggface2),
    "gldv2": (GLDV2, gldv2),
    "ijbc": (IJBC, faces),
    "ms1mv3": (MS1MV3, faces),
    "market1501": (MARKET1501, market1501),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("imagenet", ("independent", "embedding_128", "fct_simclr")),
        ("places365", ("fct_simclr", "imagenet:fct_simclr", "disjoint:fct_simclr")),
        ("vggface2", ("independent", "fct_raw")),
    ],
)
def test_a_set_of_class_folders_has_the_rows_of_its_tables(
    name: str, rows: tuple[str, ...], digits: Path, tmp_path: Path
) -> None:
    preset, write = LAYOUTS[name]
    write(digits, tmp_path / "set")
    small = replace(
        preset,
        splits=(replace(SMALL, tested_class_end=3 if name == "vggface2" else 6),),
    )
    if preset.other_domain is not None:
        small = replace(small, other_domain=replace(preset.other_domain, splits=(SMALL,)))
    results = compare(small, tmp_path / "set", tmp_path / "out", [0], rows, 1, CPU)
    assert set(results.main.rows) == set(rows)
    for row in results.main.rows.values():
        assert 0 < row.cells["new/served"]["map"][0] <= 1
        assert {"old/old", "new/old", "new/new"} < set(row.cells)
        assert "backfill random" in row.cells
    linked, runs = (tmp_path / "out" / name / part for part in ("published", "seed-0/main"))
    assert len(list_images(linked / "test")) == (150 if name == "vggface2" else 96)
    if name == "places365":
        # SimCLR learns on all classes of the other set.
        side = load_config(runs / "side-simclr" / CONFIG)
        assert (side.images, side.classes) == (linked / "side" / "train", None)
        assert set(list_images(side.images).class_names) == set("456789")
        for run, known in (
            ("side/old", "456"),
            ("side/side-simclr", "456"),
            ("side/new", "456789"),
        ):
            assert set(read_finished(runs / run).class_names) == set(known)
        for run, known in (("side/upgrade-fct_simclr", "456789"), ("new", "012345")):
            assert set(read_finished(runs / run).class_names) == set(known)
        # All are tested on the same images.
        old = [results.main.rows[row].cells["new/new"]["map"][0] for row in rows]
        assert old[0] == old[2] != old[1]
    if name == "vggface2":
        raw = load_config(runs / "upgrade-fct_raw" / CONFIG).model_dump()
        assert raw["options"] == {"raw": True} and raw["old_side"] == runs / "side-alternate"


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rows", "figures"),
    [
        (
            "gldv2",
            ("scenario-open-data:independent", "scenario-open-data:dmu"),
            {"gldv2 map_at_100", "roxford5k map_medium"},
        ),
        ("ijbc", ("independent", "bct"), {"ijbc tar@far=0.0001", "ijbc rank-1"}),
        (
            "ms1mv3",
            ("extended-data:independent", "extended-data:bct", "extended-data:refined"),
            {"ijbc tar@far=0.0001", "ijbc rank-5"},
        ),
        (
            "market1501",
            ("independent", "bct"),
            {"market1501 map", "market1501 rank-1"},
        ),
    ],
)
def test_a_set_with_a_protocol_has_its_figures_and_the_papers_criteria(
    name: str, rows: tuple[str, ...], figures: set[str], digits: Path, tmp_path: Path
) -> None:
    preset, write = LAYOUTS[name]
    write(digits, tmp_path / "set")
    # IMDB-Face is not to be had whole any more: its classes are those that are there.
    small = replace(preset, dmu_hidden_dim=16)
    if name != "ijbc":
        small = replace(small, splits=(SMALL,))
    planned = train_and_measure(small, tmp_path / "set", tmp_path / "out", [0, 1], rows, 1, CPU)
    measured = summarise_by_protocols(planned)
    assert set(measured) == set(rows)
    bound = measured[rows[0]].cells["new/new"]
    for row in measured.values():
        assert row.seeds == 2 and figures <= set(row.cells["new/served"])
        assert not {"rparis6k map_medium"} & set(row.cells["new/served"])
        for figure in figures:
            old, served, new = (
                row.cells[cell][figure][0] for cell in ("old/old", "new/served", "new/new")
            )
            criteria = row.criteria[figure]
            assert criteria["compatible"] == (served > old)
            assert criteria["degradation"] == pytest.approx(1 - new / bound[figure][0])
    page = write_protocols(tmp_path / "out", name, measured, "command", "machine")
    for row_name in rows:
        assert f"| {row_name} | {min(figures)} | " in page
    trained = load_config(tmp_path / "out" / name / "seed-0" / "main" / OLD_RUNS[name] / CONFIG)
    assert len(list_images(trained.images, trained.classes)) == OLD_IMAGES[name]


OLD_RUNS = {
    "gldv2": "scenario-old-data", "ijbc": "old", "ms1mv3": "old-data", "market1501": "old",
}  # fmt: skip
# 30 % of 40 images of 6 classes, or half of the classes.
OLD_IMAGES = {"gldv2": 72, "ijbc": 120, "ms1mv3": 72, "market1501": 120}


def test_market1501_is_a_loop_over_the_runs_vectors(digits: Path, tmp_path: Path) -> None:
    market1501(digits, tmp_path / "set")
    small = replace(MARKET1501, splits=(SMALL,))
    planned = train_and_measure(
        small, tmp_path / "set", tmp_path / "out", [0], ["independent"], 1, CPU
    )
    measured = summarise_by_protocols(planned)["independent"]
    runs = tmp_path / "out" / "market1501" / "seed-0" / "main"

    def vectors(run: str, part: str) -> tuple[list[str], np.ndarray]:
        encoder = encoder_of_run(runs / run, "embedder")
        listing = list_images(tmp_path / "parts" / part)
        images = ListedImages(listing, encoder.image_size, ReadingOptions())
        names = [path.split("/")[1] for path in listing.paths]
        return names, cached_features(encoder, images, tmp_path / "features")

    for part in ("query", "bounding_box_test"):
        (tmp_path / "parts" / part).mkdir(parents=True)
        (tmp_path / "parts" / part / "all").symlink_to(tmp_path / "set" / part)
    asked, queries = vectors("new", "query")
    held, gallery = vectors("new", "bounding_box_test")
    hits = []
    for name, query in zip(asked, queries, strict=True):
        cosine = gallery @ query / np.linalg.norm(gallery, axis=1)
        order = [held[i] for i in np.argsort(-cosine)]
        person, camera = name[:4], name.split("_")[1][:2]
        hits.append(
            next(
                other[:4] == person
                for other in order
                if not other.startswith("-1")
                and not (other[:4] == person and other.split("_")[1][:2] == camera)
            )
        )
    assert measured.cells["new/new"]["market1501 rank-1"][0] == pytest.approx(np.mean(hits))


def test_the_command_writes_a_table_and_resumes(
    digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a configuration of a CPU in the place of the data set's."""
    market1501(digits, tmp_path / "set")
    (tmp_path / "tiny").mkdir()
    config: dict[str, object] = {"kind": "embedder", "run_dir": "r", "images": "i"}
    config |= {"scale": 16.0, "augmentation": {"translate": 0.1}} | CPU["embedder"]
    text = json.dumps({key: value for key, value in config.items() if value is not None})
    (tmp_path / "tiny" / "embedder-1.yaml").write_text(text)
    tiny = replace(
        MARKET1501,
        configs_folder=str(tmp_path / "tiny"),
        upgrade_configs_folder="digits-8px",
        splits=(SMALL,),
    )
    monkeypatch.setitem(PRESETS, "market1501", tiny)
    arguments: list[str | Path] = [
        "--data",
        "market1501",
        "--images",
        tmp_path / "set",
    ]
    arguments += ["--out", tmp_path / "out", "--seeds", "1", "--jobs", "1"]
    results = [invoke(command.app, *arguments) for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 0], results[0].exception
    page = (tmp_path / "out" / "market1501.md").read_text("utf-8")
    assert all(page in result.output for result in results)
    measured, _, published = page.partition("## Published figures")
    assert measured.count("| bct | market1501 ") == 2 and "BCT Eq. 2 | update gain" in measured
    assert "| bct | market1501 map | new/new | 60.10 |" in published
    assert "compare.py trained" in results[0].output
    assert "compare.py trained" not in results[1].output
    report = json.loads((tmp_path / "out" / "market1501.json").read_text("utf-8"))
    assert report["command"] == (
        "python training/compare.py --data market1501 --seeds 1 --images FOLDER"
    )
    # A table's seeds; one has no deviation.
    assert (tmp_path / "out" / "market1501" / "seed-1000").is_dir()
    assert report["rows"]["bct"]["cells"]["new/old"]["market1501 map"][1] is None


@pytest.mark.parametrize("name", LAYOUTS)
def test_another_layout_is_refused_before_any_training(name: str, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for images in (("--images", tmp_path / "set"), ()):
        result = invoke(command.app, "--data", name, "--out", tmp_path / "out", *images)
        assert result.exit_code == (66 if images else 78), result.output
        data = LAYOUTS[name][0].published_set
        assert data is not None and data.expected_layout in " ".join(result.output.split())
    assert not list(tmp_path.glob("out/*/seed-*"))


def test_a_part_of_a_set_is_no_table_of_it(digits: Path, tmp_path: Path) -> None:
    imagenet(digits, tmp_path / "set")
    with pytest.raises(InvalidInputError, match=r"1,000 synsets.*1000 classes.*got 6"):
        compare(IMAGENET, tmp_path / "set", tmp_path / "out", [0], ["independent"], 1, CPU)


def test_a_missing_image_of_a_protocol_is_named(digits: Path, tmp_path: Path) -> None:
    faces(digits, tmp_path / "set")
    (tmp_path / "set" / "loose_crop" / "3.jpg").unlink()
    result = invoke(
        command.app, "--data", "ijbc", "--images", tmp_path / "set", "--out", tmp_path / "out"
    )
    assert result.exit_code == 66 and "3.jpg" in result.output


def test_rows_have_the_networks_of_the_papers(tmp_path: Path) -> None:
    """VGGFace2's new model, DMU's and UniBCT's deeper ones; UniBCT's epochs are 35 everywhere."""

    def runs(preset: Preset) -> dict[str, Mapping[str, object]]:
        place = ComparisonPlace(preset, preset.splits[0], 0, tmp_path, tmp_path)
        rows = list_rows(place, preset.row_groups)
        return {run.folder.name: run.config_values for row in rows for run in row.runs}

    faces_runs = runs(VGGFACE2)
    assert (faces_runs["old"]["backbone"], faces_runs["new"]["backbone"]) == (
        "resnet18", "resnet50",
    )  # fmt: skip
    assert faces_runs["side-alternate"]["backbone"] == "resnet18"
    landmarks = runs(GLDV2)
    assert landmarks["scenario-deeper-dmu"]["backbone"] == "resnet101"
    assert landmarks["scenario-swin-dmu"]["backbone"] == "swin_t"
    assert landmarks["scenario-old-data"]["backbone"] == "resnet50"
    people = runs(MS1MV3)
    assert people["identical-data-refined"]["backbone"] == "resnet50"
    assert people["open-data-refined"]["backbone"] == "resnet18"
    assert {run["epochs"] for run in people.values()} == {35}
    assert {run["lr_steps"] for run in people.values()} == {(20, 26, 32)}
    assert {"extended-data-drop", "extended-data-bct"} < set(people)


# Tables 3 to 5, 7 and 8 of dmu.txt: method, options, and whether psi serves the gallery.
DMU_ROWS: Mapping[str, tuple[str, dict[str, object], bool]] = {
    "bct_sys": ("bct_sys", {}, False),
    "dmu": ("dmu", {"hidden_dim": 1024}, True),
    "dmu_confidence": ("dmu", {"hidden_dim": 1024, "measure": "confidence"}, True),
    "dmu_selective": ("dmu", {"hidden_dim": 1024, "forward": False}, False),
    "dmu_forward": ("dmu", {"hidden_dim": 1024, "measure": "uniform"}, True),
    "dmu_width_half": ("dmu", {"hidden_dim": 512}, True),
    "dmu_width_double": ("dmu", {"hidden_dim": 2048}, True),
    "bct_regression": (
        "dmu",
        {
            "hidden_dim": 1024, "measure": "uniform", "forward": False,
            "regularizer": "regression",
        },
        False,
    ),
    "dmu_regression": ("dmu", {"hidden_dim": 1024, "regularizer": "regression"}, True),
    "focal": ("focal", {}, False),
    "unibct": ("unibct", {}, False),
}  # fmt: skip


def test_dmus_ablations_are_those_of_its_tables(tmp_path: Path) -> None:
    """All from the old model of 30 % of the images, on all of them, from one random start."""
    place = ComparisonPlace(GLDV2, GLDV2.splits[0], 0, tmp_path, tmp_path)
    rows = {row.name: row for row in list_rows(place, ("ablations",))}
    scenario = "scenario-extended-data:"
    own = {name.removeprefix(scenario) for name in rows if name.startswith(scenario)}
    assert own == {"independent", *DMU_ROWS}
    for name, (method, options, has_psi) in DMU_ROWS.items():
        row = rows[scenario + name]
        assert (
            row.new_run.config_values["method"] == method
            and row.new_run.config_values["options"] == options
        )
        assert row.upgrade_runs == ((row.new_run,) if has_psi else ())
        assert row.old_run == rows[scenario + "independent"].old_run
        assert row.new_run.config_values["images"] == tmp_path / "extended-data" / "new"
        assert (
            row.new_run.config_values["seed"]
            == rows[scenario + "independent"].new_run.config_values["seed"]
        )
    # Table 1 has the same trainings.
    table_1 = {row.name: row for row in list_rows(place, ("scenarios",))}
    assert table_1[scenario + "dmu"] == rows[scenario + "dmu"]


def test_models_of_imagenet_are_tested_on_places(tmp_path: Path) -> None:
    """FCT Tables 9 and 14: ImageNet's own models, and Places' model after one of ImageNet."""
    place = ComparisonPlace(PLACES365, PLACES365.splits[0], 0, tmp_path / "p", tmp_path / "r")
    other, places = place.images_folder / "side" / "train", place.images_folder / "train"
    rows = {row.name: row for row in list_rows(place, ("foreign", "disjoint"))}
    for row in rows.values():
        assert row.test_folder == "test"
        for run in row.runs:
            parse_config(dict(run.config_values), str(run.folder))

    def images(run: TrainingRun) -> tuple[object, object]:
        return run.config_values["images"], run.config_values["classes"]

    sides = ("none", "autoencoder", "alternate", "simclr")
    foreign = ["imagenet:independent", *(f"imagenet:fct_{kind}" for kind in sides)]
    assert set(rows) == {
        *foreign, "imagenet:residual_simclr",
        "disjoint:independent", "disjoint:fct_none", "disjoint:fct_simclr",
    }  # fmt: skip
    for name in foreign:
        row = rows[name]
        assert (images(row.old_run), images(row.new_run)) == ((other, 500), (other, 1000))
        assert (
            row.old_run.config_values["embedding_dim"]
            == row.new_run.config_values["embedding_dim"]
            == 128
        )
        assert row.side_run is None or images(row.side_run) == (other, 500)
        assert [images(run) for run in row.upgrade_runs] in ([], [(other, 1000)])
    row = rows["disjoint:fct_simclr"]
    assert row.old_run == rows["imagenet:independent"].new_run
    assert (
        images(row.new_run) == (places, 365) and row.new_run.config_values["embedding_dim"] == 512
    )
    assert row.side_run is not None and images(row.side_run) == (other, None)
    assert images(row.upgrade_runs[0]) == (places, None)


def test_bcts_tables_3_and_4_are_as_printed(tmp_path: Path) -> None:
    place = ComparisonPlace(IJBC, IJBC.splits[0], 0, tmp_path, tmp_path)
    rows = {row.name: row for row in list_rows(place, IJBC.row_groups)}

    def ends(name: str, *keys: str) -> list[tuple[object, ...]]:
        models = (rows[name].old_run, rows[name].new_run)
        return [tuple(run.config_values.get(key) for key in keys) for run in models]

    table_3 = ("backbone", "embedding_dim", "last_nonlin", "head", "margin", "classes")
    old = ("resnet101", 128, None, "cosface", 0.4, 29500)
    new = ("resnet101", 128, None, "cosface", 0.4, 59000)
    deeper = ("resnet152", *new[1:])
    assert ends("bct", *table_3) == [old, new]
    assert ends("bct_deeper", *table_3) == [old, deeper]
    assert ends("bct_wide", *table_3) == [old, ("resnet152", 256, *new[2:])]
    assert ends("bct_relu", *table_3) == [old, ("resnet152", 128, True, *new[3:])]
    softmax, normed = ("softmax", None, 59000), ("cosface", 0.0, 59000)
    assert ends("bct_softmax_to_cosine", *table_3) == [(*new[:3], *softmax), new]
    assert ends("bct_norm_softmax_to_cosine", *table_3) == [(*new[:3], *normed), new]
    for name in ("deeper", "wide", "relu", "norm_softmax_to_cosine", "softmax_to_cosine"):
        assert rows[f"bct_{name}"].new_run.config_values["method"] == "bct"
    # Table 4: (phi_3, phi_1), (phi_2, phi_1), (phi_3, phi_2), and the bound of phi_2.
    chain, first, second = (rows[f"bct_{name}"] for name in ("chain", "first_hop", "second_hop"))
    models = (first.old_run, first.new_run, second.new_run)
    assert [run.config_values["classes"] for run in models] == [14750, 29500, 59000]
    assert (first.old_run, second.new_run) == (chain.old_run, chain.new_run)
    assert (
        first.new_run == second.old_run
        and first.new_run.config_values["old"] == first.old_run.folder
    )
    assert second.new_run.config_values["old"] == first.new_run.folder
    alone = rows["independent_first_hop"]
    assert (
        upper_bound_key(alone) == upper_bound_key(first)
        and "old" not in alone.new_run.config_values
    )


# The groups of rows that the papers' tables need.
GROUPS = {
    "gldv2": ("scenarios", "ablations"), "ijbc": IJBC.row_groups,
    "ms1mv3": ("allocations", "scenarios"), "market1501": ("independent", "bct"),
}  # fmt: skip


@pytest.mark.parametrize("name", GROUPS)
def test_every_figure_of_a_paper_has_a_row(name: str, tmp_path: Path) -> None:
    """No cell is printed twice, and only rows that no table has are left."""
    preset = LAYOUTS[name][0]
    place = ComparisonPlace(preset, preset.splits[0], 0, tmp_path, tmp_path)
    rows = {row.name for row in list_rows(place, GROUPS[name])}
    printed = [
        (row, cell, figure)
        for table in PAPER_TABLES[name]
        for row, cells in table.rows.items()
        for cell, values in cells.items()
        for figure, _ in zip(table.figures, values, strict=True)
    ]
    assert len(set(printed)) == len(printed)
    assert {cell for _, cell, _ in printed} <= {"old/old", "new/served", "new/new"}
    # DMU Table 2 has two of the four scenarios.
    missing = {
        f"scenario-{setting}:{method}"
        for setting in ("extended-class", "deeper")
        for method in ("independent", "bct_sys", "dmu")
    }
    assert rows - {row for row, _, _ in printed} == (missing if name == "ms1mv3" else set())
    assert {row for row, _, _ in printed} <= rows


def test_figures_of_the_papers_stand_beside_ours(tmp_path: Path) -> None:
    """The page has those of the rows that were run."""
    figure = "gldv2 map_at_100"
    cells: dict[str, dict[str, Figure]] = {
        "new/new": {figure: (0.25, None)},
        "new/served": {figure: (0.2, 0.01)},
    }
    run = {f"scenario-extended-data:{name}": ProtocolRow(1, cells, {}) for name in ("dmu", "focal")}
    page = write_protocols(tmp_path, "gldv2", run, "a command", "a machine")
    lines = page.split("## Published figures")[1].strip().splitlines()[2:]
    dmu, focal = ("scenario-extended-data:dmu", "scenario-extended-data:focal")
    assert lines == [
        f"| {dmu} | {figure} | new/new | 25.00 | 25.00 | DMU Table 1 |",
        f"| {dmu} | roxford5k map_medium | new/new | 74.07 | - | DMU Table 1 |",
        f"| {dmu} | rparis6k map_medium | new/new | 86.59 | - | DMU Table 1 |",
        f"| {dmu} | {figure} | new/served | 22.56 | 20.00 ±1.00 | DMU Table 1 |",
        f"| {dmu} | roxford5k map_medium | new/served | 66.68 | - | DMU Table 1 |",
        f"| {dmu} | rparis6k map_medium | new/served | 84.48 | - | DMU Table 1 |",
        f"| {focal} | {figure} | new/new | 25.24 | 25.00 | DMU Table 8 |",
        f"| {focal} | {figure} | new/served | 20.02 | 20.00 ±1.00 | DMU Table 8 |",
    ]
    assert "Published" not in write_protocols(tmp_path, "folder", run, "a command", "a machine")
