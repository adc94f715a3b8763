"""The gate judges what is served: int8 twins where there are any, chains included."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from nobackfill.class_folders import list_images
from nobackfill.metrics.ranking import relevance_by_label
from nobackfill.quality.cells import parse_cell
from nobackfill.quality.embedded import PublishedListing
from nobackfill.quality.gate import ReleaseEvidence, measure_release
from nobackfill.quality.listing import split_halves
from nobackfill.quality.retrieval import search_cell
from nobackfill.quality.route_evidence import fit_calibration
from nobackfill.release.manifest import (
    Manifest,
    Upgrade,
    embedder_path,
    release_space_id,
    upgrade_int8_path,
    upgrade_path,
)
from nobackfill.release.publishing.draft import describe_file
from nobackfill.release.trust.trust import Publication, read_publication
from nobackfill.training.cli.table import gate_table
from tests.support import graphs
from tests.training.life import Life


@dataclass(frozen=True)
class Drafted:
    """Manifests of releases, and the local files of what they name."""

    manifests: Mapping[int, Manifest]
    files: Mapping[str, Path]


@pytest.fixture(scope="module")
def spoilt(life: Life, tmp_path_factory: pytest.TempPathFactory) -> Drafted:
    """The life, but the int8 twin of its upgrade leads nowhere."""
    published = read_publication(life.repo).manifests
    folder = tmp_path_factory.mktemp("spoilt")
    path = upgrade_int8_path(1, 2)
    graph = onnx.load(life.repo / upgrade_path(1, 2))
    rng = np.random.default_rng(0)
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.ndim == 2:
            noise = rng.standard_normal(values.shape).astype(values.dtype)
            tensor.CopyFrom(numpy_helper.from_array(noise, tensor.name))
    graphs.save(graph, folder / path)
    (upgrade,) = published[2].upgrades
    twin = upgrade.model_copy(update={"int8_file": describe_file(path, folder / path)})
    new = published[2].model_copy(update={"upgrades": (twin,)})
    files = {
        file.path: life.repo / file.path
        for manifest in published.values()
        for file in manifest.files()
    }
    return Drafted({1: published[1], 2: new}, {**files, path: folder / path})


def measured(
    life: Life, drafted: Drafted, release: int, int8_loss: float = 1.0
) -> tuple[Manifest, ReleaseEvidence]:
    before = {n: m for n, m in drafted.manifests.items() if n < release}
    return measure_release(
        drafted.manifests[release],
        Publication(before, frozenset()),
        drafted.files,
        list_images(life.data / "eval"),
        seed=0,
        int8_loss=int8_loss,
    )


def test_what_is_served_is_what_is_judged_and_recorded(life: Life) -> None:
    new = read_publication(life.repo).manifests[2]
    assert new.upgrades[0].int8_file is not None
    (route,) = new.routes
    cells = {f"{cell.query}/{cell.gallery}": cell for cell in new.evidence}
    assert route.int8_map == cells["2/1>2"].map
    assert route.retention == pytest.approx(route.int8_map / cells["2/2"].map)
    # On the way to all embedded again, from the one cell to the other; a line changes no end.
    assert route.healing is not None and len(route.healing.map) == 11
    for curve in (route.healing.map, route.healing.scaled_map):
        assert curve[0] == pytest.approx(route.int8_map, abs=0.01)
        assert curve[-1] == pytest.approx(cells["2/2"].map, abs=0.01)


@pytest.mark.long
def test_a_twin_that_fails_the_gate_is_not_published(life: Life, spoilt: Drafted) -> None:
    """A loss that the bound allows can still take more than the release gains."""
    new, evidence = measured(life, spoilt, 2)
    assert new.upgrades[0].int8_file is None
    assert evidence.gate_verdict.verdict == "passed"
    (route,) = evidence.routes
    assert route.int8_map is None
    assert all(not row.float32_only for row in evidence.gain_rows)


def third(life: Life, spoilt: Drafted, folder: Path) -> Drafted:
    """A release 3 that embeds as release 2 does, with an upgrade that changes nothing."""
    second = spoilt.manifests[2]
    embedder = onnx.load(life.repo / embedder_path(2))
    embedder.doc_string = "release 3"
    dim = second.embedder.dim
    ends = [helper.make_tensor_value_info(n, 1, ["n", dim]) for n in ("embedding", "upgraded")]
    same = graphs.model(
        [helper.make_node("Identity", ["embedding"], ["upgraded"])], ends[:1], ends[1:], {}
    )
    files = {embedder_path(3): embedder, upgrade_path(2, 3): same}
    for path, graph in files.items():
        graphs.save(graph, folder / path)
    spec = second.embedder.model_copy(
        update={"file": describe_file(embedder_path(3), folder / embedder_path(3))}
    )
    upgrade = Upgrade(
        from_release=2,
        from_space=second.space,
        from_dim=dim,
        from_side_space=None,
        from_side_dim=0,
        method="identity",
        file=describe_file(upgrade_path(2, 3), folder / upgrade_path(2, 3)),
        side="drops",
        predicts_uncertainty=False,
    )
    new = second.model_copy(
        update={
            "release": 3,
            "embedder": spec,
            "space": release_space_id(spec),
            "side_space": None,
            "side_encoder": None,
            "upgrades": (upgrade,),
        }
    )
    local = {path: folder / path for path in files}
    return Drafted({**spoilt.manifests, 3: new}, {**spoilt.files, **local})


@pytest.mark.long
def test_a_chain_is_judged_with_the_twins_on_its_way(
    life: Life, spoilt: Drafted, tmp_path: Path
) -> None:
    """Release 2 is out with a twin that leads nowhere: what goes on through it is no better."""
    _, evidence = measured(life, third(life, spoilt, tmp_path), 3)
    rows = {str(row): row for row in evidence.gain_rows}
    assert set(rows) == {"3/2>3", "3/1>2>3", "3/1>2>3 float32"}
    assert rows["3/1>2>3 float32"].passes
    assert not rows["3/1>2>3"].passes
    assert evidence.gate_verdict.verdict == "failed"
    assert "3/1>2>3 does not beat 1/1" in evidence.gate_verdict.detail
    chain = next(route for route in evidence.routes if route.releases == (1, 2, 3))
    best = next(cell for cell in evidence.cells if (cell.query, cell.gallery) == ("3", "3"))
    assert chain.int8_map is not None
    assert chain.int8_map < chain.map
    assert chain.retention == pytest.approx(chain.int8_map / best.map)
    assert "3/1>2>3 float32" in gate_table(evidence)


def test_calibration_is_fitted_to_what_is_served(life: Life) -> None:
    published = read_publication(life.repo).manifests
    listing = list_images(life.data / "eval")
    rows, _ = split_halves(listing, 0)
    half = listing.select(rows)
    embedded = PublishedListing(half, life.repo, published)
    relevance = relevance_by_label(half.labels, half.labels, half.paths, half.paths)
    fitted = {}
    for int8 in (False, True):
        found = search_cell(parse_cell("2/1>2"), embedded, embedded, relevance, int8=int8)
        fitted[int8] = fit_calibration(
            published[2].space,
            published[2].space,
            "upgraded",
            found.neighbours,
            found.distances,
            relevance,
            len(half),
        )
    assert fitted[True] in published[2].calibration
    assert fitted[True] != fitted[False]
