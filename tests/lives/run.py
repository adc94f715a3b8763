"""Random lives of the whole system against the model: `make random SEEDS=20 OPS=10000`.

Each operation draws from a generator of its own, made of the life's seed and its number, so that a
life is lived again from its seed.
"""

import argparse
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np

from tests.lives import devices, gateway_items, gateway_releases, publication
from tests.lives.life import Life
from tests.lives.model import Device, Publication, Server
from tests.lives.pictures import Pictures
from tests.lives.world import World
from tests.server.process import triton_venv
from tests.support.memory import memory_folder

Operation = Callable[[Life], None]

# How often each is done, against the others.
OFTEN: dict[Operation, float] = {
    gateway_items.search_image: 24,
    gateway_items.search_vectors: 18,
    gateway_items.put: 16,
    gateway_items.delete: 8,
    gateway_items.look: 8,
    gateway_items.count: 3,
    gateway_items.put_nonsense: 1,
    gateway_releases.tell: 1,
    devices.search: 8,
    devices.add_images: 4,
    devices.remove_images: 3,
    devices.sync_now: 1.5,
    devices.check: 0.5,
}
# These take about a second each.
SELDOM: dict[Operation, float] = {
    publication.publish: 0.1,
    publication.take_back: 0.03,
    publication.sign_anew: 0.3,
    publication.replay: 0.2,
    gateway_releases.activate: 0.3,
    gateway_releases.begin: 0.25,
    gateway_releases.end: 0.1,
    gateway_releases.rollback: 0.35,
    gateway_releases.retire: 0.06,
    gateway_releases.make_or_delete: 0.3,
    gateway_releases.kill: 0.25,
    devices.go_back: 0.2,
    devices.collect_garbage: 0.1,
    devices.killed: 0.3,
}


class WrongError(Exception):
    """The system is not what the model says."""


def live(seed: int, operations: int, top: Path, *options: str, seldom: float = 1.0) -> str:
    """One life; what happened in it. `seldom`: how many times as often the seldom operations are.

    Raises WrongError naming seed and operation.
    """
    published = Publication({1: ()})
    world = World(top, Pictures(), *options)
    life = Life(world, published, Server(published), Device(published, 1), _rng(seed, 0))
    weights = OFTEN | {operation: weight * seldom for operation, weight in SELDOM.items()}
    names = list(weights)
    shares = np.array(list(weights.values())) / sum(weights.values())
    done, took = Counter[str](), defaultdict[str, float](float)
    number, name = 0, "begin"
    try:
        world.begin()
        life.stamps = (world.timestamp().read_bytes(),)
        gateway_items.fill(life)
        devices.make(life)
        for number in range(1, operations + 1):
            life.rng = _rng(seed, number)
            operation = names[life.rng.choice(len(names), p=shares)]
            name, began = operation.__name__, time.monotonic()
            operation(life)
            done[name] += 1
            took[name] += time.monotonic() - began
        for operation in (gateway_releases.end, gateway_items.count, devices.check):
            operation(life)
    except Exception as error:
        log = world.served.log.read_text().splitlines()[-12:]
        raise WrongError(f"seed {seed}, operation {number} ({name})", *log) from error
    finally:
        world.close()
    table = [
        f"{took[name]:7.1f} s {done[name]:6d} {name}" for name in sorted(took, key=took.__getitem__)
    ]
    return "\n".join([*table, f"{sum(took.values()):7.1f} s {world.restarts:6d} gateways started"])


def _rng(seed: int, number: int) -> np.random.Generator:
    return np.random.default_rng([seed, number])


def main() -> None:
    """Live through the seeds that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20, help="how many lives")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--operations", type=int, default=10_000)
    asked = parser.parse_args()
    failed = []
    for seed in range(asked.first, asked.first + asked.seeds):
        # Every fifth life has a real Triton, where it is installed.
        venv = triton_venv() if seed % 5 == 0 else None
        options = ["--triton=in-process"] if venv is None else [f"--triton-venv={venv}"]
        began = time.monotonic()
        with memory_folder(Path("build") / "lives" / str(seed)) as top:
            try:
                told = live(seed, asked.operations, top, *options)
            except WrongError as wrong:
                failed.append(seed)
                cause = traceback.format_exception(wrong.__cause__, limit=-4)
                told = "\n".join([*wrong.args, *cause])
        print(f"seed {seed}: {asked.operations} operations, {time.monotonic() - began:.0f} s")
        print(told, flush=True)
    if failed:
        sys.exit(f"wrong: seeds {failed}; live one again with --first REPORT_SEED --seeds 1")


if __name__ == "__main__":
    main()
