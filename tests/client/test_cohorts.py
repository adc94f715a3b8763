"""A release goes to a share of the devices first: signed, growing, chosen on the device."""

import math
from collections.abc import Iterable
from pathlib import Path

import pytest
from prometheus_client.core import Metric

from nobackfill.client.device import Device
from nobackfill.client.sync import SyncOptions, send_report
from nobackfill.digests import is_in_share, share_digest
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)
from nobackfill.release.publishing.inspection import list_releases
from nobackfill.release.publishing.renew import roll_out, withdraw
from tests.server.support import running
from tests.support import edge
from tests.support.edge import Setting


def named(setting: Setting, share: float, *, belongs: bool) -> None:
    """Give the device an id that does or does not belong to a share of release 2."""
    ids = (f"device {n}" for n in range(10_000))
    own = next(name for name in ids if is_in_share(share_digest(2, name), share) is belongs)
    with Device(setting.gallery) as device:
        device.store.update_state({"cohort": own})


def test_a_device_follows_once_its_share_has_come(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    assert roll_out(setting.repo, 2, 0.1)
    named(setting, 0.5, belongs=False)
    for share in (0.1, 0.5):
        roll_out(setting.repo, 2, share)
        assert not roll_out(setting.repo, 2, share)
        report = edge.follow(setting.gallery)
        assert (report.state, report.release) == ("up-to-date", 1)
        assert f"is rolled out to {100 * share:g} % of the devices" in report.notes[0]
        assert edge.follow(setting.gallery, SyncOptions(dry_run=True)).state == "up-to-date"
    roll_out(setting.repo, 2, 1.0)
    assert edge.follow(setting.gallery).state == "upgraded"


def test_one_of_the_share_follows_and_one_that_asks_to(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    roll_out(setting.repo, 2, 0.1)
    named(setting, 0.1, belongs=False)
    assert edge.follow(setting.gallery, SyncOptions(join_early=True)).release == 2
    # It stays, and goes back only with a withdrawal.
    assert edge.follow(setting.gallery).release == 2
    withdraw(setting.repo, 2, "worse on cats")
    assert edge.follow(setting.gallery).notes == ["release 2 was withdrawn: worse on cats"]
    with pytest.raises(PreconditionError, match="withdrawn"):
        roll_out(setting.repo, 2, 1.0)


def test_a_share_of_the_devices_is_that_share(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    roll_out(setting.repo, 2, 0.1)
    named(setting, 0.1, belongs=True)
    assert edge.follow(setting.gallery).state == "upgraded"


def test_shares_only_grow(setting: Setting, world: edge.World) -> None:
    world.publish(setting.repo, 2)
    roll_out(setting.repo, 2, 0.5)
    with pytest.raises(PreconditionError, match="shares only grow"):
        roll_out(setting.repo, 2, 0.4)
    for wrong in (0.0, 1.1, -1.0, math.nan):
        with pytest.raises(InvalidInputError):
            roll_out(setting.repo, 2, wrong)
    with pytest.raises(NotFoundError):
        roll_out(setting.repo, 9, 0.5)
    assert roll_out(setting.repo, 2, 0.6, dry_run=True)
    assert [entry.share for entry in list_releases(setting.repo)] == [1.0, 0.5]


def test_a_device_makes_an_id_of_its_own(setting: Setting) -> None:
    other = edge.make_device(setting.repo, setting.gallery.with_name("other.sqlite"))
    found = set()
    for gallery in (setting.gallery, other):
        edge.follow(gallery)
        with Device(gallery) as device:
            found.add(device.state("cohort"))
    assert len(found) == 2
    assert all(len(name) == 32 for name in found)


def test_a_report_is_five_numbers_and_sent_on_request_only(
    setting: Setting, world: edge.World, tmp_path: Path
) -> None:
    with Device(setting.gallery) as device, pytest.raises(NotFoundError, match="nothing to report"):
        send_report(device, None)
    world.publish(setting.repo, 2)
    edge.follow(setting.gallery)
    with running(setting.repo, tmp_path / "data") as gateway, Device(setting.gallery) as device:
        assert set(send_report(device, None)) == {
            "release", "probes_passed", "seconds", "neighbours_kept", "failure",
        }  # fmt: skip
        assert not _reported(gateway.metrics.registry.collect())
        sent = send_report(device, f"grpc://{gateway.address}")
        assert (sent["release"], sent["failure"], sent["neighbours_kept"]) == (2, "none", 1.0)
        assert _reported(gateway.metrics.registry.collect()) == {("2", "none"): 1.0}
        with pytest.raises(ConfigurationError):
            send_report(device, "127.0.0.1:1")


def _reported(families: Iterable[Metric]) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["release"], sample.labels["failure"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "nobackfill_device_syncs_total" and sample.value
    }
