"""A release whose own gate finds a valley: its galleries are ranked along the scale it chose."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt.converters import map_to_upgrade_onnx
from nobackfill.adopt.maps import fit_maps
from nobackfill.release.calibration import DistanceScale
from nobackfill.release.manifest import Manifest
from tests.adopt.models import expected, topical
from tests.server.support import Client, running
from tests.support import trials
from tests.training.test_text_releases import export
from tests.training.test_text_upgrades import known

# Notes of no topic: nothing in particular tells them apart.
WORDS = np.random.default_rng(8).integers(0, 40, (600, 6))
NOTES = {f"n{row}": " ".join(f"w{word}" for word in words) for row, words in enumerate(WORDS)}
CARRIED, ALL = 40, 60


@pytest.mark.long
def test_what_the_gate_chose_is_served(tmp_path: Path) -> None:
    repo, file = tmp_path / "repo", known(tmp_path / "texts.jsonl")
    models = [tmp_path / "1", tmp_path / "2"]
    for number, folder in enumerate(models):
        topical(folder, 6, 16, strength=(1.0, 4.0)[number], turned=number)
    old, new = (np.stack([expected(one, text) for text in NOTES.values()]) for one in models)
    exact = fit_maps(old, new)["affine"]
    middle = new.mean(0) / np.linalg.norm(new.mean(0))

    def second(into: Path, towards: float) -> Manifest:
        """Its upgrade brings items nearer to all queries than its model does."""
        upgrade = into.with_suffix(".onnx")
        upgrade.write_bytes(
            map_to_upgrade_onnx(
                replace(exact, bias=(exact.bias + towards * middle).astype(np.float32))
            )
        )
        return export(
            into, 2, "--text-encoder", models[1], "--upgrade", upgrade, "--eval-texts", file
        )

    with trials.near():
        export(repo, 1, "--text-encoder", models[0], "--eval-texts", file)
        for kind in ("repo", "repo.keys"):
            shutil.copytree(tmp_path / kind, tmp_path / kind.replace("repo", "exact"))
        # What 200 queries fall by on the way is chance: the map is the models' own.
        assert not any(curve.scale for curve in second(tmp_path / "exact", 0).calibration)
        with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
            client.create_gallery("g")
            notes = list(NOTES.items())
            assert not client.put_texts("g", dict(notes[:CARRIED]))
            (curve,) = [one for one in second(repo, 1.0).calibration if one.scale]
            assert (curve.origin, curve.scale is None) == ("upgraded", False)
            scale = DistanceScale(*curve.scale or ())
            client.swap(2)
            assert not client.put_texts("g", dict(notes[CARRIED:ALL]))
            for _, text in notes[CARRIED - 5 : CARRIED + 5]:
                hits = client.search("g", text=text, k=ALL).hits
                assert {hit.id for hit in hits} == {name for name, _ in notes[:ALL]}
                apart = np.array([hit.distance for hit in hits])
                carried = np.array([hit.origin == "upgraded" for hit in hits])
                assert carried.sum() == CARRIED
                # Distances are told in three digits.
                assert (np.diff(np.where(carried, scale(apart), apart)) > -0.01).all()
                assert (np.diff(apart) < -0.01).any()
