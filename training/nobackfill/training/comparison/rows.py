"""One row of a comparison's table, and the models that every row of a place shares."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from nobackfill.training.comparison.recipe import OURS, Place, Run

TEST = "test"


@dataclass(frozen=True)
class Row:
    """`new` queries a gallery of `old`, as it is or carried along `route`.

    A step of the route is an upgrade, or an embedder whose own training made one (DMU's psi).
    `side` made the side-information that is stored with the old embeddings. `int8`: through the
    exported, quantised file. `tested`: the folder of the place's images that are query and gallery.
    `limit`: its transform saw what is tested, so that it is a bound and not a method.
    """

    name: str
    old: Run
    new: Run
    route: tuple[Run, ...] = ()
    side: Run | None = None
    int8: bool = False
    tested: str = TEST
    limit: bool = False

    @property
    def runs(self) -> tuple[Run, ...]:
        """Everything that has to be trained for this row, each once."""
        sides = () if self.side is None else (self.side,)
        own = (self.old, self.new, *self.route, *sides)
        return tuple({run.folder: run for run in own}.values())


def learned(row: Row) -> tuple[object, ...]:
    """What a row's new model saw and is tested on: rows that are equal in it share one upper bound.

    Another backbone is another bound; another width of the embedding is a variant (BCT Table 3).
    """
    new = row.new.values
    return row.tested, new["images"], new["classes"], new["backbone"], new.get("width")


class Shared:
    """The models that rows have in common, described, not yet trained."""

    def __init__(self, place: Place) -> None:
        self.place, self.split = place, place.split

    @cached_property
    def old(self) -> Run:
        """phi_old."""
        return self.place.embedder("old", classes=self.split.old, role="old")

    @cached_property
    def new(self) -> Run:
        """phi_new*, trained without a thought for phi_old."""
        return self._new("new")

    @cached_property
    def _begun(self) -> Run | None:
        """The shared warm-up of the new models."""
        branch = self.place.preset.branch
        if branch is None:
            return None
        return self.place.embedder(
            "new-begun", classes=self.split.new, role="new", epochs=branch.shared_epochs
        )

    def _new(
        self, name: str, old: Run | None = None, begun: Run | None = None, **values: Any
    ) -> Run:
        branch = self.place.preset.branch
        if branch is not None:
            values["epochs"] = branch.own_epochs
        return self.place.embedder(
            name, classes=self.split.new, role="new", old=old, begun=begun or self._begun, **values
        )

    def side(self, kind: str, width: int | None = None) -> Run:
        """psi of the old model's time, of a kind of FCT section 5.1; `width` where not the
        preset's.
        """
        name, size = f"side-{kind}", {}
        if width is not None:
            name, size = f"{name}-{width}", {"side_info_dim": width}
        return self.place.side_encoder(name, classes=self.split.old, kind=kind, **size)

    def compatible(self, name: str, method: str, **options: Any) -> Run:
        """A new model trained by a compatible method on all new classes."""
        if method == "dmu":
            options = {"hidden_dim": self.place.preset.dmu_hidden_dim, **options}
        return self._new(name, self.old, method=method, options=options)

    def adapted(self, name: str, method: str, **values: Any) -> Run:
        """phi_new*, finished, as a method changes it to meet the old space."""
        return self._new(name, self.old, self.new, method=method, **values)

    def on_top(self, name: str, new: Run) -> Row:
        """Ours, from phi_old and SimCLR to a new model that was trained beside the old one."""
        simclr = self.side("simclr")
        run = self.place.upgrade(
            f"upgrade-{name}", self.old, new, classes=self.split.new, side=simclr, method=OURS
        )
        return Row(name, self.old, new, (run,), simclr)

    def upgrade_row(self, name: str, method: str, side: Run | None = None, **values: Any) -> Row:
        """An upgrade from phi_old, and psi where there is one, to phi_new*."""
        run = self.place.upgrade(
            f"upgrade-{name}",
            self.old,
            self.new,
            classes=self.split.new,
            side=side,
            method=method,
            **values,
        )
        return Row(name, self.old, self.new, (run,), side)
