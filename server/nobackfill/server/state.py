"""What the gateway remembers over a restart, in a small file that is replaced atomically."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from nobackfill import durable
from nobackfill.errors import PreconditionError, VerificationError

RolloutName = Literal["direct", "dual", "cutover"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Canary(_Strict):
    """A share of the queries that meet a release before the others do, 0 to 1.

    `steps`: shares that follow, each after `every_s` seconds. `shadow`: the old pair answers all
    the same. `most_errors`, `largest_p99_ratio`: the bounds that it stops at. `promoted`: it has
    ended well, all are to follow.
    """

    share: float
    steps: tuple[float, ...] = ()
    every_s: float = 0.0
    shadow: bool = False
    most_errors: float = 0.01
    largest_p99_ratio: float = 2.0
    promoted: bool = False


class Activation(_Strict):
    """An activation that has begun and not ended."""

    release: int
    rollout: RolloutName
    spare_cores: float
    old_space_seconds: int
    # One gallery alone, which stayed behind before; None: all.
    only: str | None = None
    # Once the upgraded galleries are whole, a share of the queries meets them first.
    canary: Canary | None = None
    # Times that it was resumed since it last got past its models' trial, or ended in order.
    resumed: int = 0


class State(_Strict):
    """`previous`: releases a rollback returns to, latest last. `ends`: space id to the Unix time
    after which its queries are refused. `failed`: release to the reason."""

    format: Literal[1] = 1
    active: int | None = None
    previous: tuple[int, ...] = ()
    retired: tuple[int, ...] = ()
    activation: Activation | None = None
    ends: dict[str, float] = {}
    failed: dict[int, str] = {}
    # Unix time of the last rollback, until an activation begins.
    rolled_back: float | None = None
    # Galleries whose upgrade was paused by the operator.
    paused: tuple[str, ...] = ()


def tried_well(now: State) -> Mapping[str, object]:
    """The models of the activation under way are not to blame if the gateway ends from here on."""
    record = now.activation
    return {} if record is None else {"activation": record.model_copy(update={"resumed": 0})}


class GatewayState(ABC):
    """Readers take `now`, one reference; each change is durable before it is seen."""

    def __init__(self, now: State) -> None:
        self._lock = threading.Lock()
        self._now = now

    @abstractmethod
    def _keep(self, new: State) -> None:
        """Make it durable. Raises CannotWriteError, UnavailableError; then nothing has changed."""

    @property
    def now(self) -> State:
        return self._now

    def active(self) -> int:
        """The release that answers. Raises PreconditionError before the first."""
        if self._now.active is None:
            raise PreconditionError(
                "no release is active yet; publish one with training/export.py and wait for it"
            )
        return self._now.active

    def change(self, **values: object) -> State:
        """Replace some values. Raises CannotWriteError; then nothing has changed."""
        return self.revise(lambda _now: values)

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        """The same with values that follow from those of now, which nobody changes meanwhile."""
        with self._lock:
            new = State.model_validate({**dict(self._now), **values_of(self._now)})
            self._keep(new)
            self._now = new
            return new


class StateFile(GatewayState):
    """In a file."""

    def __init__(self, path: Path) -> None:
        """Raises VerificationError for a damaged file, naming it."""
        self._path = path
        try:
            now = State.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            now = State()
        except (ValidationError, OSError) as error:
            raise VerificationError(
                f"{path} is damaged ({error}); restore the data folder from a backup"
            ) from error
        super().__init__(now)

    def _keep(self, new: State) -> None:
        durable.write_file(self._path, new.model_dump_json(indent=1).encode() + b"\n", 0o600)
