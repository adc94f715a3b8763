"""IJB-C on a small fixture in the real file formats, against loops."""

from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.training.protocols.persons import (
    Faces,
    pool_templates,
    read_faces,
    read_ijbc_protocol,
    read_pairs,
    read_subject_templates,
    search_templates,
    verify_templates,
)

PEOPLE = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 people: templates 10p and 10p + 1; the first of 3 images of 2 media, the second of 1."""
    faces, pairs = [], []
    for person in range(PEOPLE):
        faces += [f"{person}_{i}.jpg {10 * person} {100 * person + (i == 2)}" for i in range(3)]
        faces.append(f"{person}_3.jpg {10 * person + 1} {100 * person + 7}")
        pairs += [f"{10 * person} {10 * o + 1} {int(person == o)}" for o in range(PEOPLE)]
    (tmp_path / "ijbc_face_tid_mid.txt").write_text("\n".join(faces) + "\n")
    (tmp_path / "ijbc_template_pair_label.txt").write_text("\n".join(pairs) + "\n")
    header = "TEMPLATE_ID,SUBJECT_ID,FILENAME,SIGHTING_ID"
    for name, people in (("G1", range(6)), ("G2", range(6, PEOPLE))):
        rows = [f"{10 * p},{p},img/{p}_{i}.jpg,{p}" for p in people for i in range(3)]
        (tmp_path / f"ijbc_1N_gallery_{name}.csv").write_text("\n".join([header, *rows]))
    rows = [f"{10 * p + 1},{p},img/{p}_3.jpg,{p}" for p in range(PEOPLE)]
    (tmp_path / "ijbc_1N_probe_mixed.csv").write_text("\n".join([header, *rows]))
    return tmp_path


def vectors(faces: Faces, noise: float, seed: int = 0) -> np.ndarray:
    """A vector a face around its person's."""
    rng = np.random.default_rng(seed)
    people = np.random.default_rng(99).normal(size=(PEOPLE, 8))
    return people[faces.template_ids // 10] + noise * rng.normal(size=(len(faces.paths), 8))


def test_templates_are_means_of_media_means(folder: Path) -> None:
    faces = read_faces(folder)
    assert len(faces.paths) == 4 * PEOPLE and faces.paths[0] == "0_0.jpg"
    given = vectors(faces, 0.5)
    templates = pool_templates(faces, given)
    assert templates.ids.tolist() == sorted({*faces.template_ids.tolist()})
    expected = ((given[0] + given[1]) / 2 + given[2]) / 2
    np.testing.assert_allclose(
        templates.vectors_of(np.array([0]))[0], expected / np.linalg.norm(expected)
    )
    # Not the mean of the three images.
    assert not np.allclose(expected, given[:3].mean(0))


def test_verification_is_a_loop_over_pairs_and_thresholds(folder: Path) -> None:
    faces, pairs = read_faces(folder), read_pairs(folder)
    assert len(pairs.is_same_person) == PEOPLE**2 and pairs.is_same_person.sum() == PEOPLE
    new, old = (
        pool_templates(faces, vectors(faces, 1.2, 1)),
        pool_templates(faces, vectors(faces, 1.5, 2)),
    )
    found = verify_templates(pairs, new, old, (0.01, 0.1))
    scored = [
        (float(new.vectors_of(np.array([a]))[0] @ old.vectors_of(np.array([b]))[0]), bool(same))
        for a, b, same in zip(
            pairs.first_template_ids, pairs.second_template_ids, pairs.is_same_person, strict=True
        )
    ]
    for rate, value in found.items():
        best = 0.0
        for threshold in [s for s, _ in scored]:
            wrong = np.mean([s >= threshold for s, same in scored if not same])
            if wrong <= rate:
                right = float(np.mean([s >= threshold for s, same in scored if same]))
                best = max(best, right)
        assert value == pytest.approx(best)
    assert 0 < found[0.01] < 1
    # The first template of a pair by the first model: the other way round is another figure.
    assert verify_templates(pairs, old, new, (0.1,)) != verify_templates(pairs, new, old, (0.1,))


def test_search_is_the_mean_over_both_galleries(folder: Path) -> None:
    faces = read_faces(folder)
    probes = read_subject_templates(folder / "ijbc_1N_probe_mixed.csv")
    galleries = [read_subject_templates(folder / f"ijbc_1N_gallery_G{n}.csv") for n in (1, 2)]
    assert galleries[0].template_ids.tolist() == [0, 10, 20, 30, 40, 50]
    good = pool_templates(faces, vectors(faces, 0.05))
    perfect = search_templates(probes, galleries, good, good, (0.1,))
    own = {"tpir@fpir=0.1": 1.0, "rank-1": 1.0, "rank-5": 1.0}
    assert perfect == {
        **own,
        **{f"G{number} {name}": 1.0 for number in (1, 2) for name in own},
        "merged rank-1": 1.0,
        "merged rank-5": 1.0,
    }
    poor = pool_templates(faces, vectors(faces, 2.0))
    both = search_templates(probes, galleries, poor, poor, (0.2,))
    single = [search_templates(probes, [gallery], poor, poor, (0.2,)) for gallery in galleries]
    for name in ("tpir@fpir=0.2", "rank-1", "rank-5"):
        assert both[name] == pytest.approx((single[0][name] + single[1][name]) / 2)
        assert [both[f"G{number} {name}"] for number in (1, 2)] == [s[name] for s in single]
    assert both["rank-1"] < both["rank-5"]
    # Rank-1 of the first gallery by a loop.
    hits = []
    for person in range(6):
        query = poor.vectors_of(np.array([10 * person + 1]))[0]
        similar = [float(query @ poor.vectors_of(np.array([10 * other]))[0]) for other in range(6)]
        hits.append(int(np.argmax(similar)) == person)
    assert single[0]["rank-1"] == pytest.approx(np.mean(hits))
    # Merged, every probe has a mate among twice as many strangers.
    hits = []
    for person in range(PEOPLE):
        query = poor.vectors_of(np.array([10 * person + 1]))[0]
        similar = [float(query @ poor.vectors_of(np.array([10 * o]))[0]) for o in range(PEOPLE)]
        hits.append(int(np.argmax(similar)) == person)
    assert both["merged rank-1"] == pytest.approx(np.mean(hits)) != both["rank-1"]


def test_damaged_files_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no protocol file"):
        read_faces(tmp_path / "elsewhere")
    (folder / "ijbc_template_pair_label.txt").write_text("1 2 1\n3 4\n")
    with pytest.raises(InvalidInputError, match=r"line 2: expected 3 words, .* got 2"):
        read_pairs(folder)
    (folder / "ijbc_template_pair_label.txt").write_text("1 2 7\n")
    with pytest.raises(InvalidInputError, match="the label 0 or 1"):
        read_pairs(folder)
    (folder / "ijbc_template_pair_label.txt").write_text("1 2 1\n3 4 1\n")
    with pytest.raises(InvalidInputError, match=r"and both labels, got .* one of them alone"):
        read_pairs(folder)
    (folder / "ijbc_template_pair_label.txt").write_text(f"{2**63} 2 1\n")
    with pytest.raises(InvalidInputError, match="expected a whole number of 64 bits"):
        read_pairs(folder)
    (folder / "g.csv").write_text("TEMPLATE_ID,SUBJECT_ID\n1,5\n1,6\n")
    with pytest.raises(InvalidInputError, match="template 1 has two"):
        read_subject_templates(folder / "g.csv")
    (folder / "g.csv").write_text("TEMPLATE,SUBJECT_ID\n1,5\n")
    with pytest.raises(InvalidInputError, match="the columns TEMPLATE_ID, SUBJECT_ID"):
        read_subject_templates(folder / "g.csv")
    faces = read_faces(folder)
    with pytest.raises(InvalidInputError, match="each of the 48 faces, got 47"):
        pool_templates(faces, np.ones((47, 8)))
    with pytest.raises(InvalidInputError, match=r"template 999 .* has no face"):
        pool_templates(faces, vectors(faces, 0.1)).vectors_of(np.array([0, 999]))


@pytest.mark.parametrize("others", ["0,0\n10,1\n20,2", "999,999"])
def test_probes_of_one_kind_are_refused(folder: Path, others: str) -> None:
    """Each figure of a search needs probes with a mate in the gallery and probes without one."""
    meta = folder / "meta"
    meta.mkdir()
    for path in [*folder.iterdir()]:
        if path.is_file():
            path.rename(meta / path.name)
    head = "TEMPLATE_ID,SUBJECT_ID\n"
    (meta / "ijbc_1N_gallery_G2.csv").write_text(head + others)
    (meta / "ijbc_1N_probe_mixed.csv").write_text(f"{head}1,0\n11,1\n")
    (meta / "ijbc_1N_gallery_G1.csv").write_text(f"{head}0,0")
    with pytest.raises(InvalidInputError, match="with and without a mate in gallery G2"):
        read_ijbc_protocol(folder, folder)
