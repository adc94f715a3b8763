"""Releases with a query adapter: their manifests, drafts and trials, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nobackfill.errors import InvalidInputError, UnfitError, VerificationError
from nobackfill.release.manifest import Manifest, adapter_path, config_path, parse_manifest
from nobackfill.release.models import open_adapter
from nobackfill.release.probes import check_probes
from nobackfill.release.publishing.draft import Draft, describe_file
from nobackfill.release.publishing.inspection import verify_publication
from nobackfill.release.publishing.publish import publish
from tests.support import graphs
from tests.support.releases import draft

pytestmark = pytest.mark.usefixtures("near_gate")

SPACE = "sp-" + "0" * 64


@pytest.fixture
def first(tmp_path: Path) -> Draft:
    return draft(tmp_path / "drafts", 1)


@pytest.fixture
def second(first: Draft, tmp_path: Path) -> Draft:
    """Release 2 without an upgrade; its queries reach release 1 by an adapter."""
    return draft(tmp_path / "drafts", 2, adapts=[first.manifest])


def test_a_manifest_with_an_adapter_survives_json(first: Draft, second: Draft) -> None:
    one, two = first.manifest, second.manifest
    assert parse_manifest(two.model_dump_json(), 2) == two
    (adapter,) = two.adapters
    assert two.adapter_to(one.space) == adapter and two.adapter_to(two.space) is None
    assert two.searches_space_directly(one.space) and two.searches_directly == ()
    assert adapter_path(2, 1) in {file.path for file in two.files()}
    assert adapter_path(2, 1) not in {file.path for file in two.embedding_files()}
    assert 'name: "adapted"' in two.triton_configs()[config_path("adapter_2_to_1")]
    # Releases without one are written as before.
    assert "adapters" not in json.loads(one.model_dump_json()) and one.format == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": 4}, "format: expected 5"),
        ({"adapters": []}, "format: expected 1"),
        (
            {"searches_directly": ["old"]},
            "none to the release's own space or one in searches_directly",
        ),
        ({"adapters": "twice"}, "another older release"),
        ({"release": 1}, "another older release"),
    ],
)
def test_contradictions_are_refused(
    change: dict[str, Any], sentence: str, first: Draft, second: Draft
) -> None:
    """A reader of format 4 refuses the release by its format (test_manifest.py)."""
    fields = json.loads(second.manifest.model_dump_json())
    if change.get("adapters") == "twice":
        change = {"adapters": fields["adapters"] * 2}
    if "searches_directly" in change:
        change = {"searches_directly": [first.manifest.space]}
    with pytest.raises(UnfitError, match=sentence):
        parse_manifest(json.dumps(fields | change))


def changed(**update: object) -> Callable[[Draft], Draft]:
    def change(one: Draft) -> Draft:
        adapter = one.manifest.adapters[0].model_copy(update=update)
        return Draft(one.manifest.model_copy(update={"adapters": (adapter,)}), one.local_files)

    return change


def damaged(one: Draft) -> Draft:
    data = bytearray(one.local_files[adapter_path(2, 1)].read_bytes())
    data[-20] ^= 1
    one.local_files[adapter_path(2, 1)].write_bytes(data)
    return one


def another(one: Draft) -> Draft:
    """A map to a third block: valid, but its answers are not those of the golden probes."""
    path = one.local_files[adapter_path(2, 1)]
    graphs.save(graphs.adapter(2, 3), path)
    return changed(file=describe_file(adapter_path(2, 1), path))(one)


def upgrading(one: Draft) -> Draft:
    """The graph of an upgrade in the place of an adapter: it has another output."""
    path = one.local_files[adapter_path(2, 1)]
    graphs.save(graphs.upgrade(2, 1, reads_side=False, maps_side=False), path)
    return changed(file=describe_file(adapter_path(2, 1), path))(one)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (changed(to_space=SPACE), "fitted for another space"),
        (changed(to_unit=False), "fitted for another space"),
        (changed(to_dim=3), "fitted for another space"),
        (damaged, "adapter_2_to_1"),
        (another, "golden probe adapter_1/adapted"),
        (upgrading, "adapter_2_to_1"),
    ],
)
def test_a_wrong_adapter_is_not_published(
    spoil: Callable[[Draft], Draft], sentence: str, first: Draft, second: Draft, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    publish(repo, first)
    with pytest.raises(VerificationError, match=sentence):
        publish(repo, spoil(second))
    assert not (repo / "release-2.json").exists()


def test_an_adapter_to_a_release_of_another_folder_is_refused(
    second: Draft, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    publish(repo, draft(tmp_path / "others", 1, middle=0.4))
    with pytest.raises(VerificationError, match="query adapter to release 1: it was fitted for"):
        publish(repo, second)


def test_a_published_adapter_is_signed_verified_and_runs(
    first: Draft, second: Draft, tmp_path: Path
) -> None:
    repo = tmp_path / "repo"
    for one in (first, second):
        publish(repo, one)
    assert verify_publication(repo).releases == (1, 2)
    two: Manifest = second.manifest
    model = open_adapter(repo, two, two.adapters[0])
    queries = graphs.into_block(np.eye(8, dtype=np.float32), 2)
    np.testing.assert_allclose(
        model.run(queries), graphs.into_block(np.eye(8, dtype=np.float32), 1), atol=1e-6
    )
    with pytest.raises(InvalidInputError, match="query to adapt"):
        model.run(np.full((1, graphs.DIM), np.nan, np.float32))
    # A device holds no adapter and checks the others.
    (repo / adapter_path(2, 1)).unlink()
    check_probes(repo, two)
    with pytest.raises(VerificationError, match="adapter_2_to_1"):
        verify_publication(repo)
