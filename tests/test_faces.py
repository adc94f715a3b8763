"""Each room's face: its example runs, its names are there, and none is loaded unasked."""

import ast
import doctest
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nobackfill.release import open_embedder, open_side_encoder
from nobackfill.release.trust import read_publication
from nobackfill.server.grpc.logs import configure_logging
from tests.server.support import running
from tests.support import blocks, releases
from tests.test_architecture import ARROWS, module, sources

FACES = [
    path
    for path in sources(*ARROWS)
    if (path.name == "__init__.py" or module(path) == "nobackfill.training.side_info")
    and not module(path).startswith(
        ("nobackfill.server.", "nobackfill.client.", "nobackfill.plugins")
    )
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What examples take as there: a publication, a folder, vectors of release 1, a gateway."""
    top = tmp_path_factory.mktemp("faces")
    repo = top / "repo"
    blocks.publish_block_release(repo, 1)
    blocks.publish_block_release(repo, 2, [1])
    first = read_publication(repo).manifests[1]
    images = releases.images(3, 0)
    for label in ("cats", "dogs"):
        blocks.write_pngs(top / "pictures" / label, 2)
    for name in ("query/0002_c1s1_000451_03", "bounding_box_test/0002_c2s1_000452_01"):
        (top / "market1501" / name).parent.mkdir(parents=True)
        (top / "market1501" / f"{name}.jpg").touch()
    with running(repo, top / "data") as gateway:
        yield {
            "model_repo": repo,
            "folder": top,
            "class_folders": top / "pictures",
            "market1501": top / "market1501",
            "embedding": open_embedder(repo, first).run(images),
            "side": open_side_encoder(repo, first).run(images),
            "image": blocks.png(images[0]),
            "address": gateway.address,
            "root": repo / "1.root.json",
        }


@pytest.mark.parametrize("path", FACES, ids=module)
def test_examples_run(path: Path, given: dict[str, Any]) -> None:
    configure_logging()
    face = importlib.import_module(module(path))
    (example,) = doctest.DocTestFinder(recurse=False).find(face, globs=dict(given)) or (None,)
    assert example is not None, f"{path}: no docstring"
    assert example.examples, f"{path}: no example"
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(example, out=said.append)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize(
    "path",
    [
        # These two rooms import torch.
        pytest.param(
            path,
            marks=[pytest.mark.slow] * any(r in module(path) for r in ("training", "research")),
        )
        for path in FACES
    ],
    ids=module,
)
def test_type_checkers_read_the_names_that_are_there(path: Path) -> None:
    face = importlib.import_module(module(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module != "nobackfill.faces":
            for alias in node.names:
                if alias.name != "TYPE_CHECKING":
                    home = importlib.import_module(str(node.module))
                    assert getattr(face, alias.name) is getattr(home, alias.name)


@pytest.mark.parametrize("room", sorted(set(ARROWS) - {"training", "metrics"}))
def test_a_face_costs_nothing_until_a_name_is_asked_for(room: str) -> None:
    script = (
        f"import sys, nobackfill.{room}; assert not hasattr(nobackfill.{room}, 'no_such_name')\n"
        "print(sorted({'numpy', 'grpc', 'onnx', 'tuf'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
