"""Runs of a comparison: what to train, from what, in which folder. Paired seeds by role.

All rows of a table share one old model; methods differ in nothing but what they are about.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nobackfill.training.comparison.presets import Preset, Split, Values
from nobackfill.training.config import parse_config
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.training import train

# The method that the default recipe trains.
OURS = "residual"
# Roles of the models between the first and the last of a long chain of updates.
STEPS = ("step1", "step2", "step3", "step4")


@dataclass(frozen=True)
class Run:
    """A training: its configuration's values, and the trainings that it reads."""

    values: Values
    needs: tuple["Run", ...] = ()

    @property
    def folder(self) -> Path:
        """The run folder."""
        folder = self.values["run_dir"]
        assert isinstance(folder, Path)
        return folder


@dataclass(frozen=True)
class Place:
    """One seed and split of a comparison: where its images and runs lie."""

    preset: Preset
    split: Split
    seed: int
    images: Path
    runs: Path
    # Keys that a test or a trial shortens, over those of the preset, by kind.
    changes: Mapping[str, Values] = field(default_factory=dict)

    def embedder(
        self,
        name: str,
        *,
        classes: int | None,
        role: str,
        old: Run | None = None,
        begun: Run | None = None,
        images: Path | None = None,
        **values: Any,
    ) -> Run:
        """An embedder. `role` sets its random seed: rivals for one role start alike, from the
        weights of `begun` where that is given.
        """
        chosen: dict[str, object] = {
            **self._common("embedder", self.preset.embedder, name, role),
            "images": images or self.images / "train",
            "classes": classes,
            **({"old": old.folder} if old else {}),
            **({"init": begun.folder} if begun else {}),
            **values,
        }
        return Run(chosen, tuple(run for run in (old, begun) if run))

    def side_encoder(self, name: str, *, classes: int, kind: str, **values: Any) -> Run:
        """A side encoder of the old model's time, unless `classes` say otherwise."""
        base = _side_values(self.preset, kind)
        return Run(
            {
                **self._common("side_encoder", base, name, "side"),
                "images": self.images / "train",
                "classes": classes,
                "side_info": kind,
                **values,
            }
        )

    def upgrade(
        self,
        name: str,
        old: Run,
        new: Run,
        *,
        classes: int | None,
        side: Run | None = None,
        new_side: Run | None = None,
        **values: Any,
    ) -> Run:
        """An upgrade on the new model's training images (FCT section 3.2: D_new only)."""
        needs = [old, new]
        base = self.preset.ours if values.get("method") == OURS else self.preset.upgrade
        chosen: dict[str, object] = {
            **self._common("upgrade", base, name, "upgrade"),
            "images": self.images / "train",
            "classes": classes,
            "old": old.folder,
            "new": new.folder,
        }
        if side is not None:
            needs.append(side)
            chosen["old_side"] = side.folder
        if new_side is not None:
            needs.append(new_side)
            chosen |= {"new_side": new_side.folder, "side": "maps"}
        return Run({**chosen, **values}, tuple(needs))

    def _common(self, kind: str, base: Values, name: str, role: str) -> dict[str, object]:
        # Append only: a role's place is part of its seed.
        roles = ("old", "new", "side", "upgrade", "first", "second", "other", *STEPS)
        return {
            "kind": kind,
            **base,
            **self.changes.get(kind, {}),
            "run_dir": self.runs / name,
            "seed": 100 * self.seed + roles.index(role),
            # One for all: models of a comparison hold out the same images.
            "split_seed": 0,
        }


def _side_values(preset: Preset, kind: str) -> Values:
    """How a psi is trained: an alternate old model as the old one was (FCT section 5.1), so that
    nothing but its randomness, and mixup, is new; an autoencoder (D.4.2) and VICReg by their own
    rates.
    """
    if kind in ("alternate", "mixup"):
        as_old = {key: value for key, value in preset.embedder.items() if key != "embedding_dim"}
        return {**as_old, "side_info_dim": preset.side_encoder["side_info_dim"]}
    if kind == "autoencoder":
        views = {"augmentation": preset.embedder["augmentation"]}
        return {**preset.side_encoder, **views, **preset.autoencoder}
    if kind == "vicreg":
        # Its terms weigh 25: by the rate of SimCLR's the first steps diverge.
        return {**preset.side_encoder, "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.0}
    return preset.side_encoder


def ensure(run: Run, done: set[Path]) -> None:
    """Train `run` and what it needs, where they are not trained yet."""
    if run.folder in done:
        return
    for needed in run.needs:
        ensure(needed, done)
    train(parse_config(dict(run.values), str(run.folder)), ProgressBars(visible=False))
    done.add(run.folder)
