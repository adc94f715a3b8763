"""GLDv2 and the revisited Oxford and Paris in their real formats; pickles that are not
plain data.
"""

import pickle
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.metrics.ranking import Ranking, rank
from nobackfill.metrics.retrieval import average_precision, average_precision_at
from nobackfill.training.protocols.landmarks import (
    MAP_AT,
    Difficulty,
    image_path,
    precision_at,
    read_gldv2_protocol,
    read_landmarks,
    read_oxford_protocol,
    read_plain_pickle,
    read_revisited,
    trapezoid_average_precision,
)

IDS = [f"{i:016x}" for i in range(300)]


@pytest.fixture
def landmarks(tmp_path: Path) -> Path:
    (tmp_path / "index.csv").write_text("id,landmark\n" + "\n".join(f"{i},9" for i in IDS))
    rows = [
        f"q0,{IDS[3]} {IDS[7]},Private",
        f"q1,{IDS[5]},Public",
        "q2,None,Ignored",
        "q3," + " ".join(IDS[100:250]) + ",Private",
    ]
    (tmp_path / "retrieval_solution_v2.1.csv").write_text("id,images,Usage\n" + "\n".join(rows))
    return tmp_path


def test_landmarks_are_those_of_the_usage(landmarks: Path) -> None:
    private = read_landmarks(landmarks)
    assert private.query_ids == ("q0", "q3") and len(private.gallery_ids) == 300
    assert private.relevance.relevant[0].tolist() == [3, 7]
    assert read_landmarks(landmarks, "Public").query_ids == ("q1",)
    assert image_path("a1b2") == "a/1/b/a1b2.jpg"


def test_map_at_100_divides_by_at_most_100(landmarks: Path) -> None:
    private = read_landmarks(landmarks)
    # The second query finds its first 100 answers first: 150 exist, the score is whole.
    ranking = rank(np.array([[6.9], [0.0]]), np.arange(300.0)[:, None], private.relevance)
    assert average_precision_at(ranking, MAP_AT)[0] == pytest.approx((1 + 2 / 8) / 2)
    perfect = np.where((np.arange(300) >= 100) & (np.arange(300) < 250), 0.0, 1.0)[:, None]
    ranking = rank(np.array([[6.9], [0.0]]), perfect, private.relevance)
    assert average_precision_at(ranking, MAP_AT)[1] == 1


def test_damaged_landmark_files_are_refused(landmarks: Path) -> None:
    with pytest.raises(InvalidInputError, match="no query of usage 'private'; expected Public"):
        read_landmarks(landmarks, "private")
    (landmarks / "retrieval_solution_v2.1.csv").write_text("id,images,Usage\nq,ffff,Private")
    with pytest.raises(InvalidInputError, match=r"query q has the answer ffff, which .* does not"):
        read_landmarks(landmarks)
    (landmarks / "index.csv").unlink()
    with pytest.raises(NotFoundError, match="no protocol file"):
        read_landmarks(landmarks)


# By what is wrong: the content of index.csv (None: a folder), that of the solution, the message.
UNUSABLE = {
    "no answers": ("id\nabcd", "abcde,,Private", r"found none for any of 1 queries"),
    "a short id": ("id\nab", "abcde,ab,Private", "three characters, .*got 'ab'"),
    "a short query": ("id\nabcd", "ab,abcd,Private", "three characters, .*got 'ab'"),
    "an overlong id": (f"id\n{'a' * 300}", f"abcde,{'a' * 300},Private", "File name too long"),
    "an overlong field": (f"id\n{'a' * 140_000}", "abcde,a,Private", "comma-separated values"),
    "a folder": (None, "abcde,abcd,Private", r"index.csv: .* cannot be read \(Is a directory\)"),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_files_that_give_no_figure_are_refused(what: str, tmp_path: Path) -> None:
    """Each was a traceback, the first one only after all images had been embedded."""
    index, solution, message = UNUSABLE[what]
    if index is None:
        (tmp_path / "index.csv").mkdir()
    else:
        (tmp_path / "index.csv").write_text(index)
    (tmp_path / "retrieval_solution_v2.1.csv").write_text(f"id,images,Usage\n{solution}")
    # Nothing opens an image before all are there.
    for image in ("test/a/b/c/abcde.jpg", "index/a/b/c/abcd.jpg", "index/a/a/a/aaaa.jpg"):
        (tmp_path / image).parent.mkdir(parents=True)
        (tmp_path / image).touch()
    with pytest.raises(InvalidInputError, match=message):
        read_gldv2_protocol(tmp_path, tmp_path)


def truth() -> dict[str, object]:
    """Two queries over ten images, as in the published file; arrays and lists both occur in it."""
    return {
        "imlist": [f"oxford_{i:03d}" for i in range(10)],
        "qimlist": ["all_souls_1", "ashmolean_2"],
        "gnd": [
            {"bbx": [1.5, 2.0, 30, 40], "easy": [0, 1], "hard": [2], "junk": [3, 4]},
            {
                "bbx": np.array([0.0, 0.0, 9.0, 9.0]),
                "easy": np.array([], int),
                "hard": np.array([5, 6]),
                "junk": [],
            },
        ],
    }


@pytest.fixture
def oxford(tmp_path: Path) -> Path:
    path = tmp_path / "gnd_roxford5k.pkl"
    path.write_bytes(pickle.dumps(truth(), protocol=2))
    return path


EXPECTED: dict[Difficulty, tuple[list[int], list[int]]] = {
    "easy": ([0, 1], [2, 3, 4]),
    "medium": ([0, 1, 2], [3, 4]),
    "hard": ([2], [0, 1, 3, 4]),
}


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("difficulty", sorted(EXPECTED))
def test_difficulties_set_answers_and_junk(
    difficulty: Difficulty, protocol: int, tmp_path: Path
) -> None:
    path = tmp_path / "gnd.pkl"
    path.write_bytes(pickle.dumps(truth(), protocol=protocol))
    read = read_revisited(path, difficulty)
    assert read.query_names == ("all_souls_1", "ashmolean_2") and len(read.gallery_names) == 10
    assert read.query_boxes[0] == (1.5, 2.0, 30.0, 40.0)
    positive, ignored = EXPECTED[difficulty]
    assert read.relevance.relevant[0].tolist() == positive
    assert read.relevance.ignored[0].tolist() == ignored


def published_average_precision(positions: list[int], relevant: int) -> float:
    """The benchmark's definition, with 0-based ranks: trapezia under the precision-recall
    points.
    """
    area = 0.0
    for found, position in enumerate(positions):
        before = 1.0 if position == 0 else found / position
        after = (found + 1) / (position + 1)
        area += (before + after) / (2 * relevant)
    return area


def test_junk_neither_helps_nor_hurts_and_areas_are_trapezia(oxford: Path) -> None:
    read = read_revisited(oxford, "medium")
    # Distances 0..9 in the gallery's order: junk 3 and 4 are passed over.
    ranking = rank(np.array([[-1.0], [-1.0]]), np.arange(10.0)[:, None], read.relevance)
    assert ranking.ranks[0].tolist() == [1, 2, 3] and ranking.ranks[1].tolist() == [6, 7]
    found = trapezoid_average_precision(ranking)
    assert found[0] == 1
    assert found[1] == pytest.approx(published_average_precision([5, 6], 2))
    assert precision_at(ranking, 5).tolist() == [1.0, 0.0]
    assert precision_at(ranking, 10)[1] == pytest.approx(2 / 7)


def test_trapezia_lie_near_the_plain_average_precision() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        ranks = np.sort(rng.choice(50, 8, replace=False)) + 1
        ranking = Ranking([ranks], np.array([8]))
        expected = published_average_precision((ranks - 1).tolist(), 8)
        assert trapezoid_average_precision(ranking)[0] == pytest.approx(expected)
        assert abs(expected - average_precision(ranking)[0]) < 0.15
    unanswerable = Ranking([np.array([], int)], np.array([0]))
    assert np.isnan(trapezoid_average_precision(unanswerable)[0])
    assert np.isnan(precision_at(unanswerable, 5)[0])


class _Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("this must not be printed",)


def test_a_pickle_that_calls_anything_is_refused_before_it_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "gnd.pkl"
    for content in (_Attack(), {"imlist": [], "qimlist": _Attack()}):
        for protocol in range(6):
            path.write_bytes(pickle.dumps(content, protocol=protocol))
            with pytest.raises(InvalidInputError, match="plain data"):
                read_plain_pickle(path)
    assert capsys.readouterr().out == ""


def test_damaged_pickles_are_refused(tmp_path: Path, oxford: Path) -> None:
    whole = oxford.read_bytes()
    for end in range(0, len(whole) - 1, 23):
        oxford.write_bytes(whole[:end])
        with pytest.raises(InvalidInputError, match="plain data"):
            read_plain_pickle(oxford)
    with pytest.raises(NotFoundError):
        read_plain_pickle(tmp_path / "none.pkl")
    oxford.write_bytes(pickle.dumps({"imlist": []}))
    with pytest.raises(InvalidInputError, match="a ground truth with imlist, qimlist, and gnd"):
        read_revisited(oxford, "easy")
    outside = truth() | {"imlist": ["one"]}
    oxford.write_bytes(pickle.dumps(outside))
    with pytest.raises(InvalidInputError, match="names the gallery image 2, but there are only 1"):
        read_revisited(oxford, "medium")


@pytest.mark.parametrize("box", [[1, 2, 3], "no box", ["a", "b", "c", "d"]])
def test_a_box_that_is_not_four_numbers_is_refused(oxford: Path, box: object) -> None:
    queries = truth()["gnd"]
    assert isinstance(queries, list)
    oxford.write_bytes(pickle.dumps(truth() | {"gnd": [one | {"bbx": box} for one in queries]}))
    with pytest.raises(InvalidInputError, match="a ground truth with imlist, qimlist, and gnd"):
        read_revisited(oxford, "medium")


def test_a_pickle_that_sets_attributes_of_a_list_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "gnd.pkl"
    # An empty list, a dict, and the operation that updates the list's attributes by it.
    path.write_bytes(b"\x80\x02]}X\x01\x00\x00\x00aK\x01sb.")
    with pytest.raises(InvalidInputError, match="plain data"):
        read_plain_pickle(path)


def test_a_difficulty_without_answers_is_refused(oxford: Path) -> None:
    queries = truth()["gnd"]
    assert isinstance(queries, list)
    oxford.write_bytes(pickle.dumps(truth() | {"gnd": [one | {"hard": []} for one in queries]}))
    with pytest.raises(InvalidInputError, match=r"gnd_roxford5k\.pkl: .* any of 2 queries"):
        read_oxford_protocol(oxford.parent, oxford.parent)
