"""Golden probes: the right models pass, each other one is named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.errors import VerificationError
from nobackfill.release.manifest import Manifest, embedder_path, probes_path, upgrade_int8_path
from nobackfill.release.probes import check_probes
from nobackfill.release.publishing.draft import Draft
from tests.support import graphs
from tests.support.releases import draft, published

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def second(tmp_path: Path) -> Draft:
    return draft(tmp_path, 2, [draft(tmp_path, 1).manifest], int8=True)


def changed(second: Draft, change: Callable[[Arrays], None]) -> Manifest:
    """The manifest with other probes, digest and all."""
    path = second.local_files[probes_path(2)]
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    change(arrays)
    np.savez(path, allow_pickle=False, **arrays)
    probes = second.manifest.probes
    file = published(path.parent, probes_path(2))
    return second.manifest.model_copy(update={"probes": probes.model_copy(update={"file": file})})


def test_the_published_models_pass(second: Draft) -> None:
    check_probes(second.local_files, second.manifest)
    check_probes(second.local_files, second.manifest, upgrades=[])


@pytest.mark.parametrize(
    "name", ["embedding", "side", "upgrade_1/upgraded", "upgrade_1/upgraded_side"]
)
def test_an_output_that_differs_is_named(name: str, second: Draft) -> None:
    def shift(arrays: Arrays) -> None:
        arrays[name][-1, -1] += 2e-4

    with pytest.raises(VerificationError, match=name):
        check_probes(second.local_files, changed(second, shift))


@pytest.mark.parametrize("name", ["image", "embedding", "side", "upgrade_1/embedding"])
@pytest.mark.parametrize("emptied", [True, False], ids=["empty", "missing"])
def test_missing_and_empty_probes_are_no_proof(name: str, emptied: bool, second: Draft) -> None:
    def spoil(arrays: Arrays) -> None:
        array = arrays.pop(name)
        if emptied:
            arrays[name] = array[:0]

    with pytest.raises(VerificationError, match=name):
        check_probes(second.local_files, changed(second, spoil))


@pytest.mark.parametrize("name", ["image", "upgrade_1/embedding", "upgrade_1/side"])
def test_probes_that_a_model_cannot_read_refuse_the_release(name: str, second: Draft) -> None:
    def cut(arrays: Arrays) -> None:
        arrays[name] = arrays[name][:, :-1]

    with pytest.raises(VerificationError, match=r"golden probe \S+ \(a test input .* expected"):
        check_probes(second.local_files, changed(second, cut))


def test_expected_values_that_are_no_numbers_never_agree(second: Draft) -> None:
    def blind(arrays: Arrays) -> None:
        arrays["embedding"][:] = np.nan

    with pytest.raises(VerificationError, match="embedding"):
        check_probes(second.local_files, changed(second, blind))


def test_an_int8_twin_that_is_off_is_refused(second: Draft, tmp_path: Path) -> None:
    """The twin of another map, signed, of the right shape, but wrong."""
    path = upgrade_int8_path(1, 2)
    proto = graphs.upgrade(1, 3, reads_side=True, maps_side=True)
    graphs.save(proto, tmp_path / "2" / path)
    upgrade = second.manifest.upgrades[0].model_copy(
        update={"int8_file": published(tmp_path / "2", path)}
    )
    manifest = second.manifest.model_copy(update={"upgrades": (upgrade,)})
    with pytest.raises(VerificationError, match="upgrade_1 int8"):
        check_probes(second.local_files, manifest)


def test_a_device_checks_what_it_has(second: Draft, tmp_path: Path) -> None:
    held = tmp_path / "2"
    (held / upgrade_int8_path(1, 2)).unlink()
    check_probes(held, second.manifest)
    (held / embedder_path(2)).write_bytes(b"other")
    with pytest.raises(VerificationError, match="embedder_2"):
        check_probes(held, second.manifest)


def test_pickles_are_not_read(second: Draft, tmp_path: Path) -> None:
    path = second.local_files[probes_path(2)]
    np.savez(path, image=np.array([{"evil": 1}], dtype=object))
    file = published(path.parent, probes_path(2))
    probes = second.manifest.probes.model_copy(update={"file": file})
    manifest = second.manifest.model_copy(update={"probes": probes})
    with pytest.raises(VerificationError, match="golden probes"):
        check_probes(second.local_files, manifest)
