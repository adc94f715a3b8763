"""Names of cells, and which of them are measured."""

import pytest

from nobackfill.errors import ConfigurationError
from nobackfill.quality.cells import CellName, parse_cell, served_cells, upgrade_cells
from nobackfill.release.manifest import Manifest, Upgrade
from tests.support.releases import draft


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Release 2 with an upgrade from release 1, of which routes read a few keys."""
    folder = tmp_path_factory.mktemp("life")
    return draft(folder, 2, [draft(folder, 1).manifest]).manifest


def manifests(
    template: Manifest, edges: list[tuple[int, int, str]], direct: tuple[int, int] | None
) -> dict[int, Manifest]:
    """Releases with upgrades (from, to, side), as far as routes look at them."""

    def upgrade(source: int, side: str) -> Upgrade:
        reads = None if side == "none" else f"ss-{source}"
        return template.upgrades[0].model_copy(
            update={
                "from_release": source,
                "from_space": f"sp-{source}",
                "from_side_space": reads,
                "side": "drops" if side == "none" else side,
            }
        )

    return {
        n: template.model_copy(
            update={
                "release": n,
                "space": f"sp-{n}",
                "side_space": f"ss-{n}",
                "routes": (),
                "upgrades": tuple(upgrade(a, side) for a, b, side in edges if b == n),
                "searches_directly": (f"sp-{direct[0]}",) if direct and direct[1] == n else (),
            }
        )
        for n in (1, 2, 3)
    }


@pytest.mark.parametrize(
    ("edges", "direct", "expected"),
    [
        ([(1, 2, "maps"), (2, 3, "maps")], None, {"3/2>3", "3/1>2>3"}),
        ([(1, 2, "maps"), (2, 3, "maps"), (1, 3, "maps")], None, {"3/2>3", "3/1>2>3", "3/1>3"}),
        # The first hop drops the side-information that the second needs.
        ([(1, 2, "drops"), (2, 3, "maps")], None, {"3/2>3"}),
        ([(1, 2, "drops"), (2, 3, "none")], None, {"3/2>3", "3/1>2>3"}),
        ([], (2, 3), {"3/2"}),
        ([(2, 3, "none")], (2, 3), {"3/2", "3/2>3"}),
    ],
)
def test_every_way_of_serving_old_vectors_is_measured(
    template: Manifest,
    edges: list[tuple[int, int, str]],
    direct: tuple[int, int] | None,
    expected: set[str],
) -> None:
    made = manifests(template, edges, direct)
    cells = served_cells(made[3], made)
    assert {str(cell) for cell in cells} == expected


def test_cells_are_read_and_written_alike() -> None:
    assert parse_cell(" 3/1>2>3 ") == CellName(3, (1, 2, 3))
    assert str(parse_cell("2/1")) == "2/1"


@pytest.mark.parametrize(
    ("route", "served", "raw"), [((), "4/2", True), ((2, 3, 4), "4/2>3>4", False)]
)
def test_the_cells_of_an_upgrade_have_names(route: tuple[int, ...], served: str, raw: bool) -> None:
    cells = upgrade_cells(2, 4, route)
    assert {name: str(cell) for name, cell in cells.items()} == {
        "old/old": "2/2",
        "new/old": "4/2",
        "new/served": served,
        "new/new": "4/4",
    }
    assert [name for name, cell in cells.items() if cell.searches_unmigrated] == (
        ["new/old", "new/served"] if raw else ["new/old"]
    )


@pytest.mark.parametrize("text", ["", "2", "2/", "a/b", "2/1>", "2>1/1", "2/1>x"])
def test_what_is_no_cell_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="expected a cell like"):
        parse_cell(text)
