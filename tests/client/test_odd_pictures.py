"""Pictures of every odd kind through `add`: taken, or refused by name, and the others go on."""

from pathlib import Path

from nobackfill.client.device import Device
from nobackfill.client.maintenance import verify
from nobackfill.client.photos import add
from tests.support.edge import Setting
from tests.support.odd_pictures import ODD


def test_each_is_taken_or_refused_by_name(setting: Setting, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    folder.mkdir()
    for number, data in enumerate(ODD.values()):
        (folder / f"{number:02d}.png").write_bytes(data)
    with Device(setting.gallery) as device:
        done = add(device, [folder], {}, lambda done, total: None)
        assert verify(device)["problems"] == []
    assert len(done.added_names) + len(done.refusals) + done.duplicate_count == len(ODD)
    assert 8 < len(done.added_names) < len(ODD) - 8
    assert all(reason for reason in done.refusals.values())
