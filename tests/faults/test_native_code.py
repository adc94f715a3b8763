"""The compiled search under sanitizers of addresses and of undefined behaviour."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.faults, pytest.mark.timeout(1800)]


def build_hook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("native_build", ROOT / "core" / "native_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that uses a build with sanitizers."""
    path = tmp_path_factory.mktemp("native") / "_native.so"
    # hnswlib's prefetches read a link past the end of a full list, which does no harm.
    flags = (
        "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
        "-DNO_MANUAL_VECTORIZATION",
    )  # fmt: skip
    build_hook().compile_to(path, *flags)
    libraries = [
        subprocess.run(
            ["c++", f"-print-file-name={name}"], check=True, capture_output=True, text=True
        ).stdout.strip()
        for name in ("libasan.so", "libubsan.so", "libstdc++.so.6")
    ]
    # What Python keeps to its end is not ours. libstdc++ is there from the start, so that the
    # sanitizer finds how exceptions are thrown.
    more = {"ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "1"}
    return {
        **os.environ, **more, "LD_PRELOAD": ":".join(libraries), "NATIVE_BUILD": str(path),
    }  # fmt: skip


def run(sanitized: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT, env=sanitized, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def test_its_tests_pass_under_sanitizers(sanitized: dict[str, str]) -> None:
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.faults.sanitized")
    said = run(sanitized, *plugin, "tests/gallery/test_compiled_search.py")
    assert " passed" in said and "skipped" not in said


def test_garbage_does_it_no_harm(sanitized: dict[str, str]) -> None:
    said = run(
        sanitized,
        "-c",
        "import tests.faults.sanitized, tests.faults.native_fuzz as fuzz; fuzz.main()",
    )
    assert "cases" in said


def test_the_sanitizers_can_fail(sanitized: dict[str, str]) -> None:
    """A graph whose links lead out of it is read where nothing is."""
    wrong = (
        "import tests.faults.sanitized, numpy as np\n"
        "from nobackfill.gallery.search import _native\n"
        "from tests.gallery.test_compiled_search import made\n"
        "one = made(16, 'squared_l2', whole=False, rows=1500).base.index\n"
        "one.graph.records[:, 4:8] = 255\n"
        "nothing = np.empty((0, 16), np.float32), np.empty(0, np.int64)\n"
        "snapshot = _native.Snapshot(one.compiled, False, 64, None, *nothing, None)\n"
        "snapshot.search(np.zeros((1, 16), np.float32), 10, 10, None, None)\n"
    )
    with pytest.raises(AssertionError, match="AddressSanitizer"):
        run(sanitized, "-c", wrong)
