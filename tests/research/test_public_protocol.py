"""FCT's public CIFAR-100 protocol in small, on a CPU: its configurations, rows and page."""

from dataclasses import replace
from pathlib import Path

import pytest

from nobackfill.research.catalogue import GROUPS, list_rows
from nobackfill.research.compare import compare
from nobackfill.research.pages import PAPER_FIGURES, paper_table, results_page
from nobackfill.research.presets import CIFAR100_FCT, PRESETS, Split
from nobackfill.research.results import Results
from nobackfill.research.rows import ComparisonPlace
from nobackfill.training.config import EmbedderConfig, load_config

# The network, the images and the lengths of a minute on a CPU; every other key is the protocol's.
CPU: dict[str, dict[str, object]] = {
    "embedder": {
        "backbone": "small", "width": 8, "image_size": 8, "pixel_cache": None,
        "epochs": 3, "warmup_epochs": 1, "batch_size": 32, "lr": 0.1, "precision": "32-true",
    },
    "side_encoder": {
        "backbone": "small", "width": 8, "image_size": 8, "side_info_dim": 16, "small_crops": 0,
        "epochs": 1, "warmup_epochs": 0, "batch_size": 32, "lr": 0.1, "precision": "32-true",
    },
    "upgrade": {
        "projection_dim": 16, "inner_dim": 64,
        "epochs": 2, "warmup_epochs": 1, "batch_size": 32, "views": 1, "mixed_views": 0,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The whole comparison: 3 -> 6 digits. The folder has train and test, as CIFAR-100 has."""
    folder = tmp_path_factory.mktemp("protocol")
    for part, source in (("train", "train"), ("test", "gallery")):
        (folder / "images" / part).mkdir(parents=True)
        for digit in range(6):
            (folder / "images" / part / str(digit)).symlink_to(digits / source / str(digit))
    small = replace(CIFAR100_FCT, splits=(Split("main", 3, 6, 0, 6),))
    return compare(small, folder / "images", folder / "out", [0], None, 1, CPU)


def test_the_configurations_are_those_of_the_authors() -> None:
    """Keys of apple/ml-fct's configs/cifar100_*.yaml and dataset/data_transforms.py."""
    for number, classes in ((1, 50), (2, None)):
        config = load_config(Path(f"configs/cifar100-fct/embedder-{number}.yaml"))
        assert isinstance(config, EmbedderConfig)
        assert (config.classes, config.held_out, config.image_size) == (classes, 0, 224)
        assert (config.backbone, config.embedding_dim, config.last_nonlin) == (
            "fct_resnet50", 128, True,
        )  # fmt: skip
        assert (config.head, config.label_smoothing) == ("softmax", 0.1)
        assert (config.optimizer, config.lr, config.momentum) == ("sgd", 1.024, 0.875)
        assert (config.epochs, config.warmup_epochs, config.batch_size) == (100, 5, 1024)
        assert config.weight_decay == 0.000030517578125
        assert config.pixel_mean == (0.485, 0.456, 0.406)
        assert config.pixel_std == (0.229, 0.224, 0.225)
        assert config.augmentation.model_dump(exclude_unset=True) == {"horizontal_flip": True}
        # A kill costs an epoch.
        assert config.checkpoint_every == 1
    upgrade = CIFAR100_FCT.upgrade
    expected = {"optimizer": "adam", "lr": 0.0005, "weight_decay": 0.000030517578125}
    expected |= {"epochs": 80, "warmup_epochs": 5, "batch_size": 1024, "inner_dim": 2048}
    assert {key: upgrade[key] for key in expected} == expected


def test_every_row_runs_and_stands_beside_what_papers_print(results: Results) -> None:
    rows = results.main.rows
    assert {"independent", "bct", "fct_none", "fct_simclr", "fastfill_none"} < set(rows)
    assert {"fastfill_joint_none", "residual_none", "residual_simclr"} < set(rows)
    page = results_page(results)
    for figure in PAPER_FIGURES["cifar100-fct"]:
        ours = "-"
        if figure.row in rows:
            cell = rows[figure.row].cells[figure.cell]
            ours = " / ".join(f"{100 * cell[name][0]:.1f}" for name in ("cmc1", "map"))
        line = f"| {figure.row} | {figure.cell} | {figure.cmc1} / {figure.map} | {ours} |"
        assert line in page
    assert paper_table("digits", rows) == []


def test_the_document_has_the_published_figures() -> None:
    document = Path("docs/methods.md").read_text("utf-8")
    assert "\n".join(paper_table("cifar100-fct", {})) in document


def test_only_bt2_has_no_row_of_ours(tmp_path: Path) -> None:
    """It puts a linear map behind the embedding, which this protocol's ReLU forbids."""
    place = ComparisonPlace(CIFAR100_FCT, CIFAR100_FCT.splits[0], 0, tmp_path, tmp_path)
    names = {row.name for row in list_rows(place, CIFAR100_FCT.row_groups)}
    assert {figure.row for figure in PAPER_FIGURES["cifar100-fct"]} - names == {"bt2"}


@pytest.mark.parametrize("data", sorted(PAPER_FIGURES.keys() - {"cifar100-fct"}))
def test_every_published_figure_has_a_row_and_a_cell(data: str, tmp_path: Path) -> None:
    place = ComparisonPlace(PRESETS[data], PRESETS[data].splits[0], 0, tmp_path, tmp_path)
    rows = {row.name: row for row in list_rows(place, tuple(GROUPS))}
    ends = {"old/old", "new/old", "new/new"}
    for figure in PAPER_FIGURES[data]:
        own = {"new/served", "served/served"} if rows[figure.row].upgrade_runs else set()
        assert figure.cell in ends | own, figure
    cells = [(figure.row, figure.cell) for figure in PAPER_FIGURES[data]]
    assert len(cells) == len(set(cells))
    # Table 10 prints CMC-1 alone.
    assert any(line.endswith(" / - | - | FCT Table 10 |") for line in paper_table(data, {}))
