"""Maps that `nobackfill fit` wrote upgrade texts: what the gate measures, and what it refuses."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from PIL import Image

from nobackfill.adopt.converters import map_to_onnx, map_to_upgrade_onnx
from nobackfill.adopt.embedding.onnx_model import OnnxModel
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.errors import InvalidInputError
from nobackfill.quality.gate import decide_gate
from nobackfill.quality.listing import list_texts
from nobackfill.release.publishing.renew import withdraw
from nobackfill.release.trust.trust import Publication
from tests.adopt.models import WORDS, image_model, text_model, topical
from tests.support import text_releases, trials
from tests.training.life import run_export
from tests.training.test_text_releases import export


@pytest.fixture(autouse=True)
def _near() -> Iterator[None]:
    with trials.near():
        yield


def linear(weight: np.ndarray) -> bytes:
    """A map without a bias, of models that nobody names."""
    bias = np.zeros(len(weight), np.float32)
    return map_to_onnx(Map("affine", weight.astype(np.float32).copy(), bias, unit_norm=True))


def known(file: Path, count: int = 400, *, asked: bool = True) -> Path:
    """Texts without labels; three words of each ask for it, the loudest among them or not."""
    rng = np.random.default_rng(4)
    lines = []
    for number in range(count):
        words = [
            f"w{number % 6}",
            *(f"w{n}" for n in rng.choice(np.arange(6, 40), 5, replace=False)),
        ]
        query = {"query": " ".join(words[:4])} if asked else {}
        lines.append({"id": f"n{number}", "text": " ".join(words)} | query)
    file.write_text("\n".join(map(json.dumps, lines)))
    return file


def fitted(folder: Path) -> Path:
    """A map from `1` to `2`, of texts that nobody measures on."""
    many = [" ".join(f"w{n}" for n in row) for row in
            np.random.default_rng(8).integers(0, 40, (600, 6))]  # fmt: skip
    old, new = (OnnxModel(folder / name / "model.onnx") for name in "12")
    made = fit_maps(old.embed(many), new.embed(many))["affine"]
    file = folder / "map.onnx"
    file.write_bytes(map_to_upgrade_onnx(made.with_model_names(old.fingerprint, new.fingerprint)))
    return file


@pytest.mark.long
def test_without_labels_the_gate_says_what_its_verdict_holds_for(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", known(tmp_path / "texts.jsonl")
    first = export(
        repo, 1, "--text-encoder", topical(tmp_path / "1", 6, 16, strength=1.0, turned=0).parent,
        "--eval-texts", file,
    )  # fmt: skip
    # Each half asks for its own texts.
    (alone,) = first.evidence
    assert (alone.queries, alone.items, alone.map >= alone.cmc1 > 0.1) == (200, 200, True)
    new = topical(tmp_path / "2", 6, 16, strength=4.0, turned=1).parent
    upgrade = fitted(tmp_path)
    passed = export(repo, 2, "--text-encoder", new, "--upgrade", upgrade, "--eval-texts", file)
    assert (passed.gate.verdict, passed.gate.forced) == ("passed", False)
    assert "holds for similar things (agreement@10 +" in passed.gate.detail
    assert passed.upgrades[0].method == "affine"
    # A map into nowhere finds nothing: neither its neighbours nor the item itself.
    rng = np.random.default_rng(0)
    (tmp_path / "lost.onnx").write_bytes(linear(rng.normal(size=(16, 16))))
    refused = run_export(
        repo, 3, "--text-encoder", new, "--upgrade", tmp_path / "lost.onnx", "--eval-texts", file
    )
    assert refused.exit_code == 65
    assert "does not beat 2/2 in agreement@10 with new/new" in refused.output


def test_texts_of_one_sentence_ask_for_the_rest_of_themselves(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    said = [
        "It is late. We go home now.",
        "one two three four five six",
        "!? And then.",
        "天気。散歩。",
        "天気がいいから",
    ]
    file.write_text("\n".join(json.dumps({"id": n, "text": text}) for n, text in enumerate(said)))
    listing = list_texts(file)
    assert listing.queries == ("It is late.", "one two", "!?", "天気。", "天気")
    assert listing.texts == (
        "We go home now.",
        "three four five six",
        "And then.",
        "散歩。",
        "がいいから",
    )
    for bad, sentence in (
        ([{"id": 1, "text": "w"}], "at least one visible character"),
        (
            [{"id": 1, "text": "a b", "query": "a"}, {"id": 2, "text": "c d"}],
            "in every line or in none",
        ),
        (
            [{"id": 1, "text": "a b", "label": "x"}, {"id": 2, "text": "c d"}],
            "expected the key 'label'",
        ),
    ):
        file.write_text("\n".join(map(json.dumps, bad)))
        with pytest.raises(InvalidInputError, match=sentence):
            list_texts(file)
    few = run_export(
        tmp_path / "repo", 1, "--text-encoder", text_model(tmp_path / "m", 1).parent,
        "--eval-texts", known(file, 39),
    )  # fmt: skip
    assert "expected at least 40 texts, got 39" in few.output


# Of a picture's colour this direction tells the class, and this one nothing.
CLASS, NOISE = np.array([1.0, 1.0, -2.0]) / 6**0.5, np.array([1.0, -1.0, 0.0]) / 2**0.5
SPREAD = 0.2


def both(folder: Path, loud: float) -> tuple[str | Path, ...]:
    """Options of a release that embeds colours and their names into one space; the `loud`er, the
    better are classes told from one another."""
    weight, rng = np.eye(3) + (loud - 1) * np.outer(CLASS, CLASS), np.random.default_rng(2)
    table = np.ones((len(WORDS), 3), np.float32)
    # Of two words the mean: a class, and something beside it.
    for word in range(40):
        row = colour(word, 0.0) if word < 4 else rng.normal(0, SPREAD) * NOISE
        table[WORDS.index(f"w{word}")] = 2 * weight @ row
    text_model(folder, 0, table=table)
    return (
        "--onnx", image_model(folder / "image.onnx", 4, weight), "--text-encoder",
        folder / "model.onnx",
    )  # fmt: skip


def colour(kind: int, noise: float) -> np.ndarray:
    return np.asarray(0.5 + 0.02 * (kind - 1.5) * CLASS + noise * NOISE)


def coloured(folder: Path) -> Path:
    rng = np.random.default_rng(1)
    for number in range(160):
        kind = number % 4
        target = folder / f"c{kind}"
        target.mkdir(parents=True, exist_ok=True)
        pixels = np.full((4, 4, 3), 255 * colour(kind, rng.normal(0, SPREAD)), np.uint8)
        Image.fromarray(pixels).save(target / f"{number}.png")
    return folder


@pytest.mark.long
def test_pictures_that_are_asked_for_by_texts_pass_by_both(tmp_path: Path) -> None:
    repo, pictures, names = tmp_path / "repo", coloured(tmp_path / "eval"), tmp_path / "names.jsonl"
    said = [{"id": n, "text": f"w{n % 4} w{4 + n % 36}", "label": f"c{n % 4}"} for n in range(120)]
    names.write_text("\n".join(map(json.dumps, said)))
    measured = ("--eval", pictures, "--eval-texts", names)
    export(repo, 1, *both(tmp_path / "1", 1.0), *measured)
    weight = np.eye(3) + 7 * np.outer(CLASS, CLASS)
    (tmp_path / "map.onnx").write_bytes(linear(weight))
    made = export(
        repo, 2, *both(tmp_path / "2", 8.0), "--upgrade", tmp_path / "map.onnx", *measured
    )
    assert made.gate.verdict == "passed"
    by_image, by_text = (
        {c.name: c for c in cells} for cells in (made.evidence, made.evidence_by_text)
    )
    assert set(by_text) == set(by_image)
    assert (by_image["1/1"].queries, by_text["1/1"].queries) == (80, 120)
    for cells in (by_image, by_text):
        assert cells["2/1>2"].map > cells["1/1"].map
    # What texts ask for does not pass where the map leaves them behind.
    (tmp_path / "turned.onnx").write_bytes(linear(np.eye(3)[::-1]))
    refused = run_export(
        repo, 3, *both(tmp_path / "3", 8.0), "--upgrade", tmp_path / "turned.onnx", *measured
    )
    assert refused.exit_code == 65
    assert "3/2>3 by text" in refused.output
    unlabelled = run_export(
        repo, 3, *both(tmp_path / "3", 8.0), "--eval", pictures, "--eval-texts",
        known(tmp_path / "known.jsonl"), "--force",
    )  # fmt: skip
    assert "expected a key 'label' in each line" in unlabelled.output


def remove_weights(file: Path) -> None:
    """Move the map's weights to a file next to it, and remove that."""
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, location="map.data", size_threshold=0
    )
    file.with_name("map.data").unlink()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda file: file.write_bytes(b"no model"), "as an ONNX file"),
        (lambda file: file.unlink(), "as an ONNX file"),
        (remove_weights, "as an ONNX file"),
        (lambda file: text_model(file.parent / "m", 1).rename(file), "float32 [n, a] and"),
        (lambda file: file.write_bytes(narrow(5, 16)), "but no published release has such vectors"),
        (lambda file: file.write_bytes(narrow(16, 5)), "returns vectors of dimension 5"),
        (lambda file: file.write_bytes(narrow(16, 16, "other")), "of the model other"),
    ],
)
def test_what_is_no_upgrade_is_refused(spoil: object, sentence: str, tmp_path: Path) -> None:
    repo, model = tmp_path / "repo", text_model(tmp_path / "model", 1, 16)
    export(repo, 1, "--text-encoder", model)
    file = tmp_path / "map.onnx"
    file.write_bytes(narrow(16, 16))
    spoil(file)  # type: ignore[operator]
    result = run_export(repo, 2, "--text-encoder", model, "--upgrade", file, "--force")
    assert result.exit_code in (65, 78)
    assert sentence in result.output
    assert not (repo / "release-2.json").exists()


def test_a_map_for_numpy_is_no_upgrade(tmp_path: Path) -> None:
    model, file = text_model(tmp_path / "model", 1), tmp_path / "map.npz"
    export(tmp_path / "repo", 1, "--text-encoder", model)
    file.write_bytes(b"as fit --out writes it")
    result = run_export(tmp_path / "repo", 2, "--text-encoder", model, "--upgrade", file, "--force")
    assert result.exit_code == 78
    assert "`nobackfill fit --onnx FILE` writes it" in result.output


def test_a_map_that_names_no_model_leads_from_no_withdrawn_release(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", tmp_path / "map.onnx"
    file.write_bytes(narrow(16, 16))
    for number in (1, 2):
        export(repo, number, "--text-encoder", text_model(tmp_path / "m", number, 16), "--force")
    withdraw(repo, 2, "worse")
    third = text_model(tmp_path / "m", 3, 16)
    made = export(repo, 3, "--text-encoder", third, "--upgrade", file, "--force")
    assert [upgrade.from_release for upgrade in made.upgrades] == [1]


def test_a_map_fitted_on_exports_names_its_releases_by_their_spaces(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", tmp_path / "map.onnx"
    first, _ = (
        export(repo, number, "--text-encoder", text_model(tmp_path / "m", number, 16), "--force")
        for number in (1, 2)
    )
    words = ("--text-encoder", text_model(tmp_path / "m", 3, 16), "--upgrade", file, "--force")
    # By its dimension alone it would lead from the second.
    for old, new, sentence in (
        (f"sp-{'0' * 64}", None, "no published release"),
        (first.space, first.space, "was fitted on vectors of another new model"),
    ):
        file.write_bytes(narrow(16, 16, old, new))
        refused = run_export(repo, 3, *words)
        assert refused.exit_code == 78 and sentence in refused.output
    file.write_bytes(narrow(16, 16, first.space))
    made = export(repo, 3, *words)
    assert [upgrade.from_release for upgrade in made.upgrades] == [1]


def narrow(a: int, b: int, old: str | None = None, new: str | None = None) -> bytes:
    made = Map("affine", np.ones((b, a), np.float32), np.ones(b, np.float32), unit_norm=True)
    return map_to_upgrade_onnx(made.with_model_names(old, new))


def test_texts_are_not_left_behind_by_images(tmp_path: Path) -> None:
    """An upgrade that reads side-information carries images and no text."""
    one = text_releases.draft(tmp_path, 1, reads="both").manifest
    two = text_releases.draft(tmp_path, 2, [one], reads="both").manifest
    side = "ss-" + "0" * 64
    (plain,) = two.upgrades
    reading = two.model_copy(
        update={"upgrades": (plain.model_copy(update={"from_side_space": side}),)}
    )
    only_images = one.model_copy(update={"side_space": side, "text_encoder": None})
    for old, new, behind in (
        (one, two, False),
        (one.model_copy(update={"side_space": side}), two, False),
        (one.model_copy(update={"side_space": side}), reading, True),
        (only_images, reading, False),
    ):
        said = decide_gate(Publication({1: old}, frozenset()), [], new)
        assert ("stored texts of release 1 have no side-information" in said.detail) == behind
