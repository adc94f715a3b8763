"""`evaluate.py --protocol`: every protocol in its real layout, on a published life of two releases.

Persons, subjects and landmarks are digits; figures are compared with what the vectors give.
"""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import Result

from nobackfill.images import decode_file
from nobackfill.release.models import open_embedder, open_side_encoder, open_upgrade
from nobackfill.release.trust.trust import read_publication
from nobackfill.training.cli import evaluate
from nobackfill.training.protocols.evaluation import PROTOCOLS
from nobackfill.vectors import Vectors
from tests.training.life import SIZE, Life, invoke

CELLS = ("1/1", "2/1", "2/1>2", "2/2")


def digit_images(life: Life, part: str, each: int) -> list[tuple[int, Image.Image]]:
    """The first `each` images of every digit, with the digit."""
    return [
        (digit, Image.open(path).convert("RGB"))
        for digit in range(10)
        for path in sorted((life.data / part / str(digit)).iterdir())[:each]
    ]


def save(image: Image.Image, path: Path) -> None:
    """Without loss, whatever the suffix says: pixels are then those that a test embeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="PNG")


def ijbc(life: Life, root: Path) -> None:
    """Ten people: a template of two images of one media, a probe of one image."""
    faces, pairs = [], []
    for number, (person, image) in enumerate(digit_images(life, "gallery", 3)):
        save(image, root / "loose_crop" / f"{number}.jpg")
        probe = number % 3 == 2
        faces.append(f"{number}.jpg {10 * person + probe} {number if probe else 100 * person}")
    for person in range(10):
        pairs += [f"{10 * person} {10 * other + 1} {int(person == other)}" for other in range(10)]
    (root / "meta").mkdir()
    (root / "meta" / "ijbc_face_tid_mid.txt").write_text("\n".join(faces))
    (root / "meta" / "ijbc_template_pair_label.txt").write_text("\n".join(pairs))
    header = "template_id,SUBJECT_ID"
    for name, people, shift in (
        ("gallery_G1", range(5), 0),
        ("gallery_G2", range(5, 10), 0),
        ("probe_mixed", range(10), 1),
    ):
        rows = [f"{10 * person + shift},{person}" for person in people]
        (root / "meta" / f"ijbc_1N_{name}.csv").write_text("\n".join([header, *rows]))


def gldv2(life: Life, root: Path) -> None:
    index: dict[int, list[str]] = {digit: [] for digit in range(10)}
    for number, (digit, image) in enumerate(digit_images(life, "gallery", 4)):
        name = f"{number:016x}"
        save(image, root / "index" / "0" / "0" / "0" / f"{name}.jpg")
        index[digit].append(name)
    rows = []
    for number, (digit, image) in enumerate(digit_images(life, "queries", 2)):
        save(image, root / "test" / "f" / "f" / "f" / f"fff{number}.jpg")
        rows.append(f"fff{number},{' '.join(index[digit])},{('Private', 'Public')[number % 2]}")
    ids = [name for names in index.values() for name in names]
    # As the data set's download script leaves them.
    (root / "index" / "index.csv").write_text("\n".join(["id", *ids]))
    (root / "test" / "retrieval_solution_v2.1.csv").write_text(
        "\n".join(["id,images,Usage", *rows])
    )


def revisited(file: str) -> Callable[[Life, Path], None]:
    """Queries are pasted into larger pictures, of which the box is what the model shall see."""

    def write(life: Life, root: Path) -> None:
        gallery, queries = digit_images(life, "gallery", 4), digit_images(life, "queries", 1)
        for number, (_, image) in enumerate(gallery):
            # Paris' archives have a folder a landmark.
            inside = "paris/defense" if "paris" in file else "."
            save(image, root / "jpg" / inside / f"g{number}.jpg")
        truths = []
        for number, (digit, image) in enumerate(queries):
            page = Image.new("RGB", (40, 30), "white")
            page.paste(image, (7, 5))
            save(page, root / "jpg" / f"q{number}.jpg")
            own = [n for n, (other, _) in enumerate(gallery) if other == digit]
            box = [7.2, 5.1, 7.2 + SIZE, 5.1 + SIZE]
            truths.append({"bbx": box, "easy": own[:2], "hard": own[2:3], "junk": own[3:]})
        names = {"imlist": [f"g{n}" for n in range(40)], "qimlist": [f"q{n}" for n in range(10)]}
        (root / file).write_bytes(pickle.dumps({**names, "gnd": truths}))

    return write


def market1501(life: Life, root: Path) -> None:
    for part, source in (("query", "queries"), ("bounding_box_test", "gallery")):
        for number, (digit, image) in enumerate(digit_images(life, source, 4)):
            camera = 1 if part == "query" else 1 + number % 4
            save(image, root / part / f"{digit + 1:04d}_c{camera}s1_{number:06d}_00.jpg")
    save(Image.new("RGB", (8, 8)), root / "bounding_box_test" / "-1_c1s1_999999_00.jpg")


def vggface2(life: Life, root: Path) -> None:
    for number, (digit, image) in enumerate(digit_images(life, "eval", 52)):
        save(image, root / f"n{digit:06d}" / f"{number:04d}_01.jpg")


WRITERS: Mapping[str, Callable[[Life, Path], None]] = {
    "ijbc": ijbc,
    "gldv2": gldv2,
    "roxford5k": revisited("gnd_roxford5k.pkl"),
    "rparis6k": revisited("gnd_rparis6k.pkl"),
    "market1501": market1501,
    "vggface2": vggface2,
}
REVISITED = {
    *(f"map_{difficulty}" for difficulty in ("easy", "medium", "hard")),
    *(f"mp_at_10_{difficulty}" for difficulty in ("easy", "medium", "hard")),
}
FIGURES = {
    "ijbc": {
        "tar@far=0.0001",
        *(f"{g}{f}" for g in ("", "G1 ", "G2 ") for f in ("tpir@fpir=0.01", "rank-1", "rank-5")),
        *("merged rank-1", "merged rank-5"),
    },
    "gldv2": {"map_at_100"},
    "roxford5k": REVISITED,
    "rparis6k": REVISITED,
    "market1501": {"rank-1", "map"},
    "vggface2": {"cmc1", "cmc5", "map"},
}


def by_protocol(life: Life, name: str, root: Path, *more: str | Path) -> Result:
    """`python training/evaluate.py --protocol NAME --root FOLDER`."""
    arguments: list[str | Path] = ["--model-repo", life.repo, "--protocol", name, "--root", root]
    return invoke(evaluate.app, *arguments, *more)


def measured(life: Life, name: str, root: Path, *more: str) -> dict[str, dict[str, float]]:
    """The figures of each cell, by the command."""
    file = root / "cells.json"
    result = by_protocol(life, name, root, "--json", file, *more)
    assert result.exit_code == 0, result.output
    assert all(cell in result.output for cell in CELLS if not more)
    report = json.loads(file.read_text("utf-8"))
    assert report["protocol"] == name
    cells: dict[str, dict[str, float]] = report["cells"]
    return cells


def test_every_protocol_has_a_fixture() -> None:
    assert set(WRITERS) == set(FIGURES) == set(PROTOCOLS)


@pytest.mark.parametrize("name", WRITERS)
def test_two_releases_are_measured_by_a_protocol(name: str, life: Life, tmp_path: Path) -> None:
    WRITERS[name](life, tmp_path)
    cells = measured(life, name, tmp_path)
    assert set(cells) == set(CELLS)
    for figures in cells.values():
        assert set(figures) == FIGURES[name]
        assert all(0 <= share <= 1 for share in figures.values())
    # Each protocol's order of quality; two independent spaces share no neighbours.
    best = next(f for f in ("map_medium", "map", "map_at_100", "rank-1") if f in FIGURES[name])
    assert cells["2/1"][best] < min(cells[cell][best] for cell in ("2/1>2", "2/2"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_backfill_goes_from_the_served_figures_to_the_new_models(
    name: str, life: Life, tmp_path: Path
) -> None:
    """Every protocol by every order that its files and the upgrade allow; BCT's Figure 3."""
    WRITERS[name](life, tmp_path)
    file = tmp_path / "report.json"
    result = by_protocol(life, name, tmp_path, "--backfill", "--json", file)
    assert result.exit_code == 0, result.output
    assert "re-embedded, in percent" in result.output
    report = json.loads(file.read_text("utf-8"))
    cells, curves = report["cells"], report["backfill"]
    assert set(curves) == {"2/1", "2/1>2"}
    has_classes = name in ("ijbc", "market1501", "vggface2")
    for cell, orders in curves.items():
        assert set(orders) == {"random"} | ({"class"} if has_classes else set())
        for curve in orders.values():
            assert set(curve["figures"]) == FIGURES[name] == set(curve["means"])
            for figure, values in curve["figures"].items():
                assert values[0] == pytest.approx(cells[cell][figure])
                assert values[-1] == pytest.approx(cells["2/2"][figure])
                area = np.trapezoid(values, curve["shares"])
                assert curve["means"][figure] == pytest.approx(area)


def test_a_class_is_re_embedded_whole(life: Life, tmp_path: Path) -> None:
    """Half of VGGFace2's subjects are new, half served: no share lies inside a subject."""
    vggface2(life, tmp_path)
    file = tmp_path / "report.json"
    by_protocol(
        life, "vggface2", tmp_path, "--backfill", "--json", file, "--cells", "1/1,2/1>2,2/2"
    )
    curve = json.loads(file.read_text("utf-8"))["backfill"]["2/1>2"]["class"]
    assert np.multiply(curve["shares"], 10) == pytest.approx(np.arange(11))


def test_criteria_are_those_of_the_papers_for_each_figure(life: Life, tmp_path: Path) -> None:
    """BCT Eq. 2 and 9, DMU Eq. 6 and 7; update gain wants an independent release."""
    market1501(life, tmp_path)
    file = tmp_path / "report.json"
    result = by_protocol(life, "market1501", tmp_path, "--independent", "2", "--json", file)
    assert result.exit_code == 0, result.output
    assert "update gain" in " ".join(result.output.split())
    report = json.loads(file.read_text("utf-8"))
    cells, criteria = report["cells"], report["criterion"]
    assert set(criteria) == {"2/1", "2/1>2"}
    for figure in ("rank-1", "map"):
        old, served, new = (cells[cell][figure] for cell in ("1/1", "2/1>2", "2/2"))
        assert old < served < new
        assert criteria["2/1>2"][figure] == {
            "compatible": True,
            "update_gain": pytest.approx((served - old) / (new - old)),
            "upgrade_gain": pytest.approx((served - old) / old),
            "degradation": 0,
        }
        assert criteria["2/1"][figure]["compatible"] is False
        assert criteria["2/1"][figure]["update_gain"] is None


def embedded(life: Life, paths: list[Path], *along: int) -> Vectors:
    """Vectors of images by the published files one by one."""
    published = read_publication(life.repo).manifests
    images = np.stack([decode_file(path, SIZE, SIZE) for path in paths])
    vectors = open_embedder(life.repo, published[along[0]]).run(images)
    if len(along) == 2:
        side = open_side_encoder(life.repo, published[1]).run(images)
        new = published[2]
        return open_upgrade(life.repo, new, new.upgrades[0]).run(vectors, side).embedding
    return vectors


def test_market1501_is_a_loop_over_the_vectors(life: Life, tmp_path: Path) -> None:
    """By the door itself, as a person runs it."""
    market1501(life, tmp_path)
    command: list[str | Path] = [sys.executable, "training/evaluate.py", "--model-repo", life.repo]
    options: list[str | Path] = ["--protocol", "market1501", "--root", tmp_path, "--cells", "2/1>2"]
    subprocess.run([*command, *options, "--json", tmp_path / "cells.json"], check=True)
    told = json.loads((tmp_path / "cells.json").read_text("utf-8"))["cells"]
    asked, held = (sorted((tmp_path / p).iterdir()) for p in ("query", "bounding_box_test"))
    queries, gallery = embedded(life, asked, 2), embedded(life, held, 1, 2)
    first, precisions = [], []
    for path, query in zip(asked, queries, strict=True):
        order = np.argsort(((query - gallery) ** 2).sum(1))
        names = [held[i].name.split("_") for i in order]
        hits = [
            person == path.name[:4]
            for person, camera, *_ in names
            if person != "-1" and not (person == path.name[:4] and camera[:2] == "c1")
        ]
        found = np.cumsum(hits)
        first.append(hits[0])
        precisions.append(np.mean([found[i] / (i + 1) for i, hit in enumerate(hits) if hit]))
    assert told == {
        "2/1>2": {
            "rank-1": pytest.approx(np.mean(first)),
            "map": pytest.approx(np.mean(precisions)),
        }
    }


def test_templates_and_probes_are_each_models_own(life: Life, tmp_path: Path) -> None:
    """BCT 3.3: probes by the new model, galleries by the old one's upgraded vectors."""
    ijbc(life, tmp_path)
    told = measured(life, "ijbc", tmp_path, "--cells", "2/1>2")["2/1>2"]["rank-1"]
    paths = [tmp_path / "loose_crop" / f"{number}.jpg" for number in range(30)]
    queries = embedded(life, paths, 2)[2::3]
    stored = embedded(life, paths, 1, 2).reshape(10, 3, -1)[:, :2].mean(1)
    stored /= np.linalg.norm(stored, axis=1, keepdims=True)
    hits = []
    for people in (slice(0, 5), slice(5, 10)):
        nearest = (queries[people] @ stored[people].T).argmax(1)
        hits.append(np.mean(nearest == np.arange(5)))
    assert told == pytest.approx(np.mean(hits))


def test_operating_points_are_those_asked_for(life: Life, tmp_path: Path) -> None:
    ijbc(life, tmp_path)
    asked = ("--cells", "2/2", "--far", "0.1", "--far", "0.5", "--fpir", "0.3")
    told = measured(life, "ijbc", tmp_path, *asked)["2/2"]
    assert {"tar@far=0.1", "tar@far=0.5", "tpir@fpir=0.3", "G2 tpir@fpir=0.3"} <= set(told)
    assert "tar@far=0.0001" not in told and told["tar@far=0.1"] <= told["tar@far=0.5"]
    # The other kind stays as it is.
    alone = measured(life, "ijbc", tmp_path, "--cells", "2/2", "--far", "0.1")["2/2"]
    assert "tpir@fpir=0.01" in alone and "tpir@fpir=0.3" not in alone


def test_a_query_of_oxford_is_its_box(life: Life, tmp_path: Path) -> None:
    revisited("gnd_roxford5k.pkl")(life, tmp_path)
    whole = measured(life, "roxford5k", tmp_path, "--cells", "2/2")["2/2"]
    for number, (_, image) in enumerate(digit_images(life, "queries", 1)):
        page = Image.new("RGB", (40, 30), "black")
        page.paste(image, (7, 5))
        save(page, tmp_path / "jpg" / f"q{number}.jpg")
    assert measured(life, "roxford5k", tmp_path, "--cells", "2/2")["2/2"] == whole


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ("--protocol", "ijbb", "--root", "."),
            78,
            "unknown protocol 'ijbb'; expected one of ijbc, gldv2",
        ),
        (("--protocol", "gldv2", "--root", "nowhere"), 66, "no protocol file nowhere/index.csv"),
        (("--protocol", "gldv2"), 2, "--protocol needs --root FOLDER, and may be combined"),
        (
            ("--protocol", "gldv2", "--root", ".", "--neighbours", "3"),
            2,
            "--protocol needs --root FOLDER, and may be combined",
        ),
        (
            ("--protocol", "gldv2", "--root", ".", "--far", "0.1"),
            78,
            "--far and --fpir need --protocol ijbc",
        ),
        (("--queries", "photos", "--far", "0.1"), 2, "add --protocol ijbc"),
        (("--queries", "photos", "--root", "."), 2, "also give --protocol NAME"),
        (("--queries", "photos"), 2, "--queries FOLDER and --gallery FOLDER, or a test protocol"),
    ],
)
def test_wrong_requests_are_refused(
    life: Life, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = invoke(evaluate.app, "--model-repo", life.repo, *arguments)
    assert result.exit_code == code, result.output
    assert message in " ".join(result.output.replace("│", " ").split())


def test_a_missing_image_is_named(life: Life, tmp_path: Path) -> None:
    gldv2(life, tmp_path)
    (tmp_path / "test" / "f" / "f" / "f" / "fff2.jpg").unlink()
    result = by_protocol(life, "gldv2", tmp_path)
    assert result.exit_code == 66
    assert "1 of the protocol's 10 images are missing" in result.output
    assert "fff2.jpg" in result.output
