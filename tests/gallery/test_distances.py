"""Compiled distances: the same bits for every kind of processor, and the right ones."""

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill.gallery.search import hnsw, view
from nobackfill.vectors import Vectors

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        view.parse_search_request is None or shutil.which("c++") is None,
        reason="there is no compiler",
    ),
]
NATIVE = Path(hnsw.__file__).parent / "native"
# Each kind that this processor is of.
SOURCE = """
#include "distances.hpp"
extern "C" const nobackfill::Distances* kind(int number) {
    if (number == 0) return &nobackfill::any_processor::DISTANCES;
#ifdef __x86_64__
    if (number == 1 && __builtin_cpu_supports("avx2")) return &nobackfill::avx2::DISTANCES;
    if (number == 2 && __builtin_cpu_supports("avx512f")) return &nobackfill::avx512::DISTANCES;
#endif
    return nullptr;
}
"""
_Single = ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
_Double = ctypes.CFUNCTYPE(ctypes.c_double, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class Distances(ctypes.Structure):
    _fields_ = (
        ("squared_l2", _Single), ("inner_product", _Single),
        ("squares", _Double), ("product", _Double),
    )  # fmt: skip


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[Distances]:
    folder = tmp_path_factory.mktemp("distances")
    (folder / "kinds.cpp").write_text(SOURCE)
    flags = ("-std=c++17", "-O3", "-ffp-contract=off", "-shared", "-fPIC", f"-I{NATIVE}")
    subprocess.run(["c++", *flags, folder / "kinds.cpp", "-o", folder / "kinds.so"], check=True)
    kind = ctypes.CDLL(str(folder / "kinds.so")).kind
    kind.restype = ctypes.POINTER(Distances)
    return [found.contents for number in range(3) if (found := kind(number))]


def between(kind: Distances, x: Vectors, y: Vectors) -> tuple[float, ...]:
    a, b, dim = x.ctypes.data, y.ctypes.data, len(x)
    at = ctypes.byref(ctypes.c_size_t(dim))
    singles = (getattr(kind, name)(a, b, at) for name in ("squared_l2", "inner_product"))
    return (*singles, *(getattr(kind, name)(a, b, dim) for name in ("squares", "product")))


def pairs() -> Iterator[tuple[Vectors, Vectors]]:
    """Vectors of each dimension that is summed otherwise, at odd places in memory."""
    rng = np.random.default_rng(1)
    for dim in (*range(1, 68), 96, 100, 127, 128, 384, 513):
        for _ in range(5):
            x, y = rng.standard_normal((2, dim + 3), np.float32)
            yield x[1:-2], y[3:]


def test_every_kind_of_processor_rounds_alike(kinds: list[Distances]) -> None:
    for x, y in pairs():
        answers = {between(kind, x, y) for kind in kinds}
        assert len(answers) == 1
        squared, inner, squares, product = answers.pop()
        a, b = x.astype(np.float64), y.astype(np.float64)
        size = float(np.linalg.norm(a) * np.linalg.norm(b))
        apart = float(((a - b) ** 2).sum())
        assert squares == pytest.approx(apart, rel=1e-13)
        assert squared == pytest.approx(apart, rel=1e-5)
        assert product == pytest.approx(float(a @ b), abs=1e-14 * (1 + size))
        assert inner == pytest.approx(float(1 - a @ b), abs=1e-6 * (1 + size))


def test_a_graph_measures_by_them(kinds: list[Distances]) -> None:
    from nobackfill.gallery.search._native import Hnsw

    for x, y in pairs():
        expected = between(kinds[0], x, y)[:2]
        for space, distance in zip(("l2", "ip"), expected, strict=True):
            graph = Hnsw(space, len(x), 1, 16, 100)
            graph.add(y[None], np.zeros(1, np.int64), 1)
            found = graph.search(x[None], 1)
            assert found is not None and found[1][0, 0] == distance
