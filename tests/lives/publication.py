"""Operations on the publication: releases come, are taken back, are signed anew; and an attack."""

from nobackfill import durable
from nobackfill.errors import VerificationError
from nobackfill.release.publishing.renew import resign, withdraw
from tests.lives import devices
from tests.lives.life import Life
from tests.support import graphs

MOST_WITHDRAWN = 2


def publish(life: Life) -> None:
    """The next release: with an upgrade from the one before, and mostly from the one before it."""
    number = max(life.publication.sources) + 1
    if number > graphs.BLOCKS:
        return
    sources = [number - 1]
    if number > 2 and life.chance(0.6):
        sources.append(number - 2)
    direct = life.chance(0.3)
    life.world.publish(number, sources, direct=direct)
    life.publication.sources[number] = tuple(sources)
    life.publication.directly |= {number} if direct else set()
    _published(life)


def take_back(life: Life) -> None:
    """Withdraw a release, in use or not."""
    releases = sorted(set(life.publication.sources) - life.publication.withdrawn - {1})
    if releases and len(life.publication.withdrawn) < MOST_WITHDRAWN:
        release = life.one_of(releases)
        withdraw(life.world.repo, release, "taken back by a test")
        life.publication.withdrawn.add(release)
        _published(life)


def sign_anew(life: Life) -> None:
    """New metadata for the same releases."""
    resign(life.world.repo)
    _published(life)


def replay(life: Life) -> None:
    """An attacker hands out older signed metadata: who has seen newer may not follow it."""
    stamp, source = life.world.timestamp(), str(life.world.repo)
    devices.follow(life, source)
    devices.check_sync(life, life.device.sync())
    newest, before = stamp.read_bytes(), life.world.states()
    device, floor = devices.observed(life), devices.floor(life)
    older = [seen for seen in life.stamps if seen != newest]
    if not older:
        return
    durable.write_file(stamp, life.one_of(older))
    try:
        devices.follow(life, source)
        raise AssertionError("a device followed older metadata")
    except VerificationError:
        life.world.refresh()
        assert life.world.states() == before, "a gateway followed older metadata"
    finally:
        durable.write_file(stamp, newest)
    assert devices.observed(life) == device, "a refused sync changed something"
    assert devices.floor(life) == floor, "the floor sank"


def _published(life: Life) -> None:
    life.stamps = (*life.stamps, life.world.timestamp().read_bytes())
    life.world.refresh()
