"""What gateways remember over a restart: in a small file that is replaced atomically, or where
several of them share it."""

import json
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError

from nobackfill import durable
from nobackfill.errors import (
    CannotWriteError,
    NobackfillError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    VerificationError,
    few,
    writer_of,
)

log = structlog.get_logger("server.state")

Result = TypeVar("Result")
# Of an audit that is read.
MOST_DEEDS = 1000
# Beside a state file: a line of JSON for each deed, which nothing but a backup copies.
AUDIT = "audit.jsonl"
# Beside it: the version that wrote it, which no key of the state can say, as older versions refuse
# keys that they do not know.
WRITER = "written-by.json"
# Beside it: what a restore has not finished. Without a state file nothing may be served.
UNFINISHED_RESTORE = f"{durable.TEMPORARY}restore"
# How pydantic calls a field that a model does not have.
_EXTRA = "extra_forbidden"
# Bytes of a reason, and of galleries paused meanwhile.
_SPARE = 16 << 10
RolloutName = Literal["direct", "dual", "cutover"]


class _StrictState(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Canary(_StrictState):
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


class Activation(_StrictState):
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


class State(_StrictState):
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


def read_state(content: bytes | str, what: str, writer: object = None) -> State:
    """Raises VerificationError for one that is damaged, or that a newer version has written;
    `what`: where it is; `writer`: the version that stands beside it, if one does."""
    try:
        return State.model_validate_json(content)
    except ValidationError as error:
        wrong = error.errors()
        # Of a whole state, nothing but what this version does not know.
        unknown = [".".join(map(str, one["loc"])) for one in wrong if one["type"] == _EXTRA]
        unknown += [f"format {one['input']}" for one in wrong if one["loc"] == ("format",)]
        if len(unknown) == len(wrong):
            raise VerificationError(
                f"{what} was written by a newer nobackfill: {few(unknown)} is not known to "
                f"{version('nobackfill')}, which reads format 1; start {writer_of(writer)}"
            ) from error
        raise VerificationError(f"{what} is damaged ({error}); restore it from a backup") from error


def tried_well(now: State) -> Mapping[str, object]:
    """The models of the activation under way are not to blame if the gateway ends from here on."""
    record = now.activation
    return {} if record is None else {"activation": record.model_copy(update={"resumed": 0})}


class OutdatedError(UnavailableError):
    """What was about to be done follows from a plan that another gateway has replaced."""


class GoneError(NotFoundError):
    """A gallery, or a table that it is made of, is not there any more."""


class LeadLostError(NobackfillError):
    """Another gateway leads: nothing of this was done."""


class Lead:
    """The lead of an activation, which one gateway has at a time; by itself, where there is one."""

    def lost(self) -> bool:
        """Whether another has taken it, as far as can be known."""
        return False

    def close(self) -> None:
        """Let another have it; twice is harmless."""


class GatewayState(ABC):
    """Readers take `now`, one reference; each change is durable before it is seen.

    Where it is `shared`, other gateways change it, too: `now` is theirs soon after, and at once
    after `catch_up`.
    """

    shared = False

    def __init__(self, now: State) -> None:
        self._now = now
        # What makes this gateway follow the others.
        self.follow: Callable[[], None] = lambda: None

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

    @abstractmethod
    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        """The same with values that follow from those of now, which nobody changes meanwhile.
        Raises CannotWriteError, UnavailableError; then nothing has changed."""

    def catch_up(self) -> None:
        """Return once this gateway plans as the last commit of any gateway says. Raises
        UnavailableError."""
        self.follow()

    def look(self) -> Mapping[str, tuple[int, int]]:
        """Read what is remembered anew; the galleries that there are, with number and epoch."""
        return {}

    def together(self, work: Callable[[], Result], lead: Lead | None = None) -> Result:
        """Do `work`, whose changes of galleries and state are seen at once where they are shared;
        it may be called again. Raises LeadLostError where `lead` is over, and nothing has changed.
        """
        return work()

    def lead(self) -> Lead | None:
        """Lead an activation from here on; None where another gateway does."""
        return Lead()

    def depose(self) -> None:
        """Whoever leads an activation changes nothing more; it is forgotten."""
        if self._now.activation is not None:
            self.change(activation=None)

    def held(self, seconds: float) -> AbstractContextManager[None]:
        """No other gateway begins, undoes or retires a release meanwhile. Raises BusyError when
        that takes longer."""
        return nullcontext()

    def job(self, gallery: str) -> str | None:
        """What was kept of a gallery's last upgrade."""
        return None

    def keep_job(self, gallery: str, job: str | None) -> None:  # noqa: B027 - nobody else looks
        """Keep it where other gateways see it; None: forget it."""

    def audit(self, who: str, what: str, of_what: str) -> None:
        """Note for good who did what; one that cannot be written is in the log alone."""
        log.info("audited", who=who, what=what, of_what=of_what)
        try:
            self._keep_deed(Deed(time.time(), who, what, of_what))
        except NobackfillError as error:
            log.error("not kept in the audit", error=str(error))

    @abstractmethod
    def _keep_deed(self, deed: "Deed") -> None:
        """Raises CannotWriteError, UnavailableError."""

    @abstractmethod
    def deeds(self) -> "list[Deed]":
        """What was audited, latest last; of very many the latest."""


class Deed(NamedTuple):
    """What somebody did, and when (Unix time)."""

    time: float
    who: str
    what: str
    of_what: str


class StateFile(GatewayState):
    """In a file."""

    def __init__(self, path: Path) -> None:
        """Raises VerificationError for a damaged file, naming it."""
        self._path = path
        try:
            now = read_state(path.read_bytes(), str(path), read_writer(path.with_name(WRITER)))
        except FileNotFoundError:
            now = State()
        except OSError as error:
            raise VerificationError(
                f"{path} cannot be read ({error.strerror}); check its permissions and the disk"
            ) from error
        super().__init__(now)
        self._lock = threading.Lock()
        self._is_noted = False
        # Room for the state that an activation ends with, on a disk that is full by then.
        self._spare = path.with_name(f"{path.name}.spare")

    @property
    def _deeds(self) -> Path:
        return self._path.with_name(AUDIT)

    def _keep_deed(self, deed: Deed) -> None:
        # All ASCII: no cut is inside a character.
        line = json.dumps(deed._asdict()).encode() + b"\n"
        with self._lock:
            if _is_cut(self._deeds):
                # A deed on the line of another would be lost with it.
                line = b"\n" + line
            durable.append(self._deeds, line, 0o600)

    def deeds(self) -> list[Deed]:
        if not self._deeds.exists():
            return []
        found: list[Deed] = []
        for line in reversed(self._deeds.read_bytes().split(b"\n")):
            if len(found) == MOST_DEEDS:
                break
            # A line that a kill or a full disk has cut says nothing.
            with suppress(ValueError, TypeError):
                found.append(Deed(**json.loads(line)))
        return found[::-1]

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        with self._lock:
            new = State.model_validate({**dict(self._now), **values_of(self._now)})
            if new == self._now:
                return new
            content = new.model_dump_json(indent=1).encode() + b"\n"
            self._write(content, begins=new.activation is not None)
            self._now = new
            return new

    def _note_writer(self) -> None:
        """Let the next reader know which version writes the state. Raises CannotWriteError."""
        path, own = self._path.with_name(WRITER), version("nobackfill")
        if not self._is_noted and read_writer(path) != own:
            durable.write_file(path, json.dumps({"nobackfill": own}).encode() + b"\n", 0o600)
        self._is_noted = True

    def _write(self, content: bytes, *, begins: bool) -> None:
        """`begins`: or goes on; else no activation is under way. Raises CannotWriteError."""
        if begins and not self._spare.exists():
            durable.write_file(self._spare, bytes(len(content) + _SPARE), 0o600)
        if begins or not self._spare.exists():
            # Not where an activation ends, which a full disk does not keep from its end.
            self._note_writer()
        try:
            durable.write_file(self._path, content, 0o600)
        except CannotWriteError:
            if begins or not self._spare.exists():
                raise
            durable.write_into(self._spare, self._path, content)
        if not begins:
            durable.remove_tree(self._spare)


def read_writer(path: Path) -> object:
    """Read the version that wrote what lies beside this file; None where it does not say."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return found.get("nobackfill") if isinstance(found, dict) else None


def _is_cut(path: Path) -> bool:
    """Whether a file's last line lacks its end. Raises CannotWriteError where nobody can tell."""
    try:
        with path.open("rb") as file:
            if file.seek(0, os.SEEK_END) == 0:
                return False
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False
    except OSError as error:
        raise CannotWriteError(
            f"{path}: cannot be read before it is written ({error.strerror}); check its "
            "permissions and the disk"
        ) from error
