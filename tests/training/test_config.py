from pathlib import Path

import pytest

from nobackfill.errors import ConfigurationError
from nobackfill.research.presets import PRESETS as PRESETS_OF_COMPARE
from nobackfill.training.config import EmbedderConfig, UpgradeConfig, load_config, parse_config
from nobackfill.training.export.assembly import upgrade_recipe
from nobackfill.training.loop.run import Checkpoint

PRESETS = sorted(Path("configs").rglob("*.yaml"))


def embedder(**keys: object) -> dict[str, object]:
    values: dict[str, object] = {
        "kind": "embedder",
        "run_dir": "r",
        "images": "i",
        "image_size": 8,
        "embedding_dim": 8,
        "epochs": 3,
        "lr": 0.1,
    }
    return values | keys


def upgrade(**keys: object) -> dict[str, object]:
    values: dict[str, object] = {
        "kind": "upgrade",
        "run_dir": "r",
        "images": "i",
        "old": "a",
        "new": "b",
        "epochs": 3,
        "lr": 0.1,
    }
    return values | keys


@pytest.mark.parametrize("path", PRESETS, ids=str)
def test_every_preset_is_valid(path: Path) -> None:
    load_config(path)


@pytest.mark.parametrize("name", ["cifar100-cpu", "cifar100"])
def test_both_releases_have_the_hyper_parameters_of_the_comparison(name: str) -> None:
    preset = PRESETS_OF_COMPARE[name]
    for file in Path("configs", name).glob("*.yaml"):
        config = load_config(file)
        known = (
            preset.our_upgrade if file.name == "upgrade-1-2.yaml" else getattr(preset, config.kind)
        )
        stated = config.model_dump(exclude_unset=True)
        for key in known.keys() & stated.keys():
            assert stated[key] == known[key], (file, key)


def test_smoothing_is_softmaxs() -> None:
    parse_config(embedder(head="softmax", label_smoothing=0.1), "file.yaml")
    with pytest.raises(ConfigurationError, match="label_smoothing needs head: softmax, got arcf"):
        parse_config(embedder(head="arcface", label_smoothing=0.1), "file.yaml")


def test_an_unknown_key_is_refused_by_name_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigurationError, match=r"unknown key 'lrr'; expected one of .*\blr\b"
    ) as caught:
        parse_config(embedder(lrr=1), "file.yaml")
    assert caught.value.exit_code == 78


def test_an_unknown_nested_key_names_the_keys_of_that_level() -> None:
    with pytest.raises(
        ConfigurationError, match=r"'augmentation.zoom'; expected one of .*translate"
    ):
        parse_config(embedder(augmentation={"zoom": 2}), "file.yaml")


def test_keys_of_another_kind_are_unknown() -> None:
    with pytest.raises(ConfigurationError, match="unknown key 'inner_dim'"):
        parse_config(embedder(inner_dim=8), "file.yaml")


@pytest.mark.parametrize("kind", [None, "backbone"])
def test_kinds_are_named(kind: str | None) -> None:
    with pytest.raises(ConfigurationError, match="embedder, side_encoder, upgrade"):
        parse_config(embedder(kind=kind), "file.yaml")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"epochs": 0}, "epochs"),
        ({"lr": -1}, "lr"),
        ({"warmup_epochs": 3}, "warmup_epochs: expected a number below the key epochs"),
        ({"head": "sphereface"}, "arcface"),
        ({"embedding_dim": "wide"}, "embedding_dim"),
        ({"held_out": 0.95}, "held_out"),
    ],
)
def test_wrong_values_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config(embedder(**keys), "file.yaml")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reads_side": False, "reads_embedding": False}, "got false for both"),
        ({"side": "maps"}, "new_side"),
        ({"old": {"vectors": "v.npy", "paths": "p", "release": 1}, "views": 2}, "one view"),
    ],
)
def test_contradictions_of_an_upgrade_are_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_config(upgrade(**keys), "file.yaml")


def test_sources_may_be_runs_releases_or_stored_vectors() -> None:
    config = parse_config(upgrade(old={"model_repo": "m", "release": 3}), "file.yaml")
    assert isinstance(config, UpgradeConfig)
    assert not isinstance(config.old, Path)
    assert config.old.release == 3


def test_overrides_reach_nested_keys(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("\n".join(f"{k}: {v}" for k, v in embedder().items()), encoding="utf-8")
    config = load_config(file, ("epochs=7", "augmentation.rotate_degrees=15"))
    assert isinstance(config, EmbedderConfig)
    assert (config.epochs, config.augmentation.rotate_degrees) == (7, 15)
    with pytest.raises(ConfigurationError, match="KEY=VALUE"):
        load_config(file, ("epochs",))
    with pytest.raises(ConfigurationError, match="has a value and no keys below it"):
        load_config(file, ("epochs.most=7",))
    with pytest.raises(ConfigurationError, match="is not YAML"):
        load_config(file, ("augmentation={noise",))


def test_what_is_no_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "c.yaml", tmp_path):
        with pytest.raises(ConfigurationError, match="cannot be read"):
            load_config(path)


@pytest.mark.parametrize("text", ["{", "- a\n- b", ""])
def test_what_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError):
        load_config(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 0.1\nlr: 0.5", "the key 'lr' occurs twice"),
        ("run_dir: 2024-13-45", "is not YAML"),
        ("kind: [embedder]", r"got \['embedder'\]"),
        ("seed: 0b_", "is not YAML"),
        ("[" * 3000, "is not YAML"),
    ],
)
def test_what_is_no_configuration_is_told_in_a_sentence(
    tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigurationError, match=message):
        load_config(file)


def test_a_value_that_is_no_yaml_is_told_in_a_sentence() -> None:
    for value in ("2024-02-30", "!!int abc", "!!timestamp 1", "[" * 3000):
        with pytest.raises(ConfigurationError, match=r"--set run_dir=.*not YAML"):
            load_config(Path("configs/digits/embedder-1.yaml"), (f"run_dir={value}",))


@pytest.mark.parametrize(
    "keys",
    [
        {"lr": float("inf")}, {"gradient_clip": float("inf")}, {"seed": -1}, {"seed": 2**32},
        {"split_seed": 2**60}, {"pixel_std": (0.5, 0.0, 0.5)}, {"pixel_mean": (float("nan"),) * 3},
    ],
    ids=str,
)  # fmt: skip
def test_numbers_that_could_not_be_kept_are_refused(
    keys: dict[str, object],
) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(keys))):
        parse_config(embedder(**keys), "file.yaml")


HOME = "/home/someone"
IMAGES = {name: f"{HOME}/{name}" for name in ("run_dir", "images", "class_list", "pixel_cache")}


@pytest.mark.parametrize(
    "values",
    [
        embedder(**IMAGES, old=f"{HOME}/old", init=f"{HOME}/init"),
        embedder(**IMAGES, weights=f"{HOME}/weights.pt"),
        embedder(**IMAGES, weights=f"open_clip:ViT-B-32/{HOME}/weights.pt"),
        {
            **IMAGES, "kind": "side_encoder", "image_size": 8, "epochs": 1, "lr": 0.1,
            "side_info": "inner", "side_info_dim": 2, "embedder": f"{HOME}/embedder",
        },
        upgrade(
            **IMAGES, old={"vectors": f"{HOME}/v", "paths": f"{HOME}/p", "release": 1},
            new=f"{HOME}/new", old_side=f"{HOME}/old_side", new_side=f"{HOME}/new_side",
        ),
    ],
)  # fmt: skip
def test_no_path_of_this_machine_is_published(values: dict[str, object]) -> None:
    checkpoint = Checkpoint(parse_config(values, "file.yaml"), {}, 0, 0, (), {})
    recipe = upgrade_recipe("part", checkpoint)
    assert recipe["part.epochs"] == checkpoint.config.epochs
    assert HOME not in str(recipe)
