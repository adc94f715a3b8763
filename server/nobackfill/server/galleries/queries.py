"""Questions of searches: what is asked of a gallery's spaces, answered together where it can be."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.errors import InvalidInputError
from nobackfill.gallery.matches import Matches
from nobackfill.gallery.search.index import Neighbours
from nobackfill.server.galleries.hosted import Hosted
from nobackfill.server.galleries.plan import Both, Part
from nobackfill.vectors import Vectors

# The space before, and a query's vector [1,dim] there.
Before = tuple[Both, Vectors]


@dataclass(frozen=True)
class Question:
    """A query's vectors float32 [1,dim], one for each of `parts`; `ef` as in Index.search.

    `before`: where both models rank what is carried.
    """

    hosted: Hosted
    parts: tuple[Part, ...]
    vectors: tuple[Vectors, ...]
    k: int
    ef: int
    before: Before | None = None


# The whole answer's bytes to a question that needs no more; None: it does.
Shortcut = Callable[[Question], bytes | None]
# Each part's neighbours of a batch, and the row of one query in them; or why it was refused.
Answer = tuple[Sequence[Neighbours], int] | InvalidInputError


def run(questions: Sequence[Question], allowed: Matches | None = None) -> Sequence[Answer]:
    """Answer questions together, those with the same parts by one search a part."""
    if len(questions) == 1:
        question = questions[0]
        return [(_search(question.hosted, question.parts, questions, allowed), 0)]
    groups: dict[tuple[Part, ...], list[int]] = {}
    for i, question in enumerate(questions):
        groups.setdefault(question.parts, []).append(i)
    answers: dict[int, Answer] = {}
    for parts, members in groups.items():
        group = [questions[i] for i in members]
        try:
            found = _search(group[0].hosted, parts, group, allowed)
        except InvalidInputError:
            # One of them is no vector of its space: find out which.
            answers.update({i: _alone(questions[i], allowed) for i in members})
        else:
            answers.update({i: (found, row) for row, i in enumerate(members)})
    return [answers[i] for i in range(len(questions))]


def _alone(question: Question, allowed: Matches | None) -> Answer:
    try:
        return _search(question.hosted, question.parts, [question], allowed), 0
    except InvalidInputError as error:
        return error


def _search(
    hosted: Hosted, parts: tuple[Part, ...], questions: Sequence[Question], allowed: Matches | None
) -> list[Neighbours]:
    k = max(question.k for question in questions)
    # The same in all of them: with one of its own a question, or a request, is searched alone.
    ef = questions[0].ef
    if len(questions) == 1:
        columns = list(questions[0].vectors)
    else:
        columns = [
            np.concatenate([question.vectors[i] for question in questions])
            for i in range(len(parts))
        ]
    began = time.monotonic()
    found = hosted.search(parts, columns, k, allowed, ef)
    if not ef:
        # What searches take that nobody asked to take longer.
        hosted.speed.took(time.monotonic() - began, len(questions))
    return found
