"""Keep what gateways must know after a restart: in a file, or in a database that they share."""

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
    describe_writer,
    join_few,
)

log = structlog.get_logger("server.state")

Result = TypeVar("Result")
# Most entries of the audit that are returned.
MAX_AUDIT_ENTRIES = 1000
# Name of the audit, next to the state file: one line of JSON for each entry. Only backups copy it.
AUDIT = "audit.jsonl"
# Name of the file that records the version that wrote the state, next to it. It is no key of the
# state, because older versions refuse unknown keys.
WRITER = "written-by.json"
# Marker of an unfinished restore, next to the state file. No gallery is served while it exists
# without a state file.
UNFINISHED_RESTORE = f"{durable.TEMPORARY_PREFIX}restore"
# pydantic's error type for a field that the model does not have.
_EXTRA = "extra_forbidden"
# Spare bytes for a failure's reason and for galleries that are paused during the activation.
_SPARE = 16 << 10
RolloutName = Literal["direct", "dual", "cutover"]


class _StrictState(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Canary(_StrictState):
    """Hold the settings of a canary.

    Attributes:
        share: share of the callers that the new release answers, above 0 and at most 1.
        steps: the shares that follow, in rising order.
        every_s: seconds between two steps.
        shadow: compare only; the old release still answers every caller.
        most_errors: the canary stops above this share of errors.
        largest_p99_ratio: the canary stops above this ratio of the new release's p99 latency to the
            old one's.
        promoted: the canary has ended, and the release is to answer all callers.
    """

    share: float
    steps: tuple[float, ...] = ()
    every_s: float = 0.0
    shadow: bool = False
    most_errors: float = 0.01
    largest_p99_ratio: float = 2.0
    promoted: bool = False


class Activation(_StrictState):
    """Record an activation that has begun and not ended; a restart resumes it."""

    release: int
    rollout: RolloutName
    spare_cores: float
    old_space_seconds: int
    # The only gallery to upgrade; None means all.
    only: str | None = None
    # Settings of the canary that precedes the switch; None means no canary.
    canary: Canary | None = None
    # Number of resumes since its models last passed their probes, or since a gateway stopped in
    # order.
    resumed: int = 0


class State(_StrictState):
    """Hold what a gateway remembers.

    Attributes:
        active: the release that answers; None before the first activation.
        previous: releases that a rollback can return to, latest last.
        retired: releases whose vectors and models were deleted.
        activation: the activation under way, if any.
        ends: by space id, the Unix time after which queries of the space are refused.
        failed: by release, why its last activation failed.
        rolled_back: Unix time of the last rollback; None once a later activation has begun.
        paused: names of galleries whose upgrade an operator has paused.
    """

    format: Literal[1] = 1
    active: int | None = None
    previous: tuple[int, ...] = ()
    retired: tuple[int, ...] = ()
    activation: Activation | None = None
    ends: dict[str, float] = {}
    failed: dict[int, str] = {}
    rolled_back: float | None = None
    paused: tuple[str, ...] = ()


def parse_state(content: bytes | str, error_name: str, writer: object = None) -> State:
    """Parse a saved state; fields that are missing have their defaults.

    Args:
        content: the state as JSON.
        error_name: the place of the state, for errors.
        writer: the version that is recorded as its writer; None if none is.

    Raises:
        VerificationError: the state is damaged, or a newer version wrote it.
    """
    try:
        return State.model_validate_json(content)
    except ValidationError as error:
        problems = error.errors()
        # If every problem is an unknown field or format, the state is intact but newer.
        unknown = [
            ".".join(map(str, problem["loc"])) for problem in problems if problem["type"] == _EXTRA
        ]
        unknown += [
            f"format {problem['input']}" for problem in problems if problem["loc"] == ("format",)
        ]
        if len(unknown) == len(problems):
            raise VerificationError(
                f"{error_name} was written by a newer nobackfill: {join_few(unknown)} is not known "
                f"to nobackfill {version('nobackfill')}, which reads format 1; start "
                f"{describe_writer(writer)}"
            ) from error
        where = ".".join(map(str, problems[0]["loc"])) or "content"
        raise VerificationError(
            f"{error_name}: the gateway's state is damaged ({where}: {problems[0]['msg']}); "
            "restore the state from a backup with `gateway data restore`, or from a backup of the "
            "database"
        ) from error


def resume_count_reset(state: State) -> Mapping[str, object]:
    """Return the change of a state that clears its count of resumes, for `GatewayState.revise`;
    empty without an activation.

    A later crash is then not blamed on the models. The state itself is not changed.
    """
    record = state.activation
    return {} if record is None else {"activation": record.model_copy(update={"resumed": 0})}


class OutdatedPlanError(UnavailableError):
    """The operation used a plan that another gateway has replaced."""


class GalleryDeletedError(NotFoundError):
    """A gallery, or one of its tables, was deleted."""


class LeadershipLostError(NobackfillError):
    """Another gateway leads the activation; the transaction was rolled back."""


class Leadership:
    """Represent the right to lead an activation, which one gateway has at a time.

    A gateway that shares nothing always has it.
    """

    def is_lost(self) -> bool:
        """Tell whether another gateway has taken the lead, as far as this one can know."""
        return False

    def close(self) -> None:
        """Give up the lead, so that another gateway may take it; a second call does nothing."""


class GatewayState(ABC):
    """Keep the state of a gateway, and change it durably.

    Readers use `current`, an immutable value that each change replaces once it is durable. If
    `shared` is true, other gateways change the state, too: `current` follows them shortly after,
    and at once after `catch_up`.
    """

    shared = False

    def __init__(self, state: State) -> None:
        # The latest state that this gateway knows.
        self.current = state
        # Replaced by the object that makes this gateway follow the others.
        self.follow_others: Callable[[], None] = lambda: None

    def active_release(self) -> int:
        """Return the number of the release that answers, by the latest state that this gateway
        knows.

        Raises:
            PreconditionError: no release was ever activated.
        """
        if self.current.active is None:
            raise PreconditionError(
                "this gateway has no active release yet; publish one with training/export.py or "
                "`gateway sample`: the gateway activates the first release by itself"
            )
        return self.current.active

    def change(self, **values: object) -> State:
        """Replace some fields of the state, durably; `current` then has them.

        Within `transact`, `current` has them after its commit.

        Args:
            values: new value by the name of a field of State; other names and wrong types raise
                pydantic's ValidationError.

        Returns:
            The new state.

        Raises:
            CannotWriteError: the state cannot be written; it is unchanged.
            BusyError: the database is busy; the state is unchanged.
            UnavailableError: the database does not answer; the state is unchanged.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return self.revise(lambda _current: values)

    @abstractmethod
    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        """Replace fields by values that depend on the present state, atomically and durably;
        `current` then has them.

        Within `transact`, `current` has them after its commit.

        Args:
            values_of: computes the new values, by the name of a field of State, from the state;
                empty changes nothing. It may be called more than once, and must not call the state.
                Its errors pass through.

        Returns:
            The new state.

        Raises:
            CannotWriteError: the state cannot be written; it is unchanged.
            BusyError: the database is busy; the state is unchanged.
            UnavailableError: the database does not answer; the state is unchanged.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            pydantic.ValidationError: a name is no field of State, or a value has the wrong type;
                the state is unchanged.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def catch_up(self) -> None:
        """Make this gateway plan by the last commit of any gateway; see GatewayFollower.catch_up.

        Does nothing if the state is not shared, or the gateway does not follow others yet.

        Raises:
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            VerificationError: the shared state or a new gallery is damaged, or a model fails its
                check.
            CannotWriteError: the publication's verified metadata cannot be stored.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        self.follow_others()

    def refresh(self) -> Mapping[str, tuple[int, int]]:
        """Read the state again; `current` then has it. Without a shared state it does nothing.

        Returns:
            Number and epoch of each gallery by name; empty if the state is not shared.

        Raises:
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return {}

    def transact(self, work: Callable[[], Result], lead: Leadership | None = None) -> Result:
        """Run work whose changes other gateways see all at once, or not at all.

        Args:
            work: changes galleries and the state; it may be called more than once.
            lead: the lead under which the work is done; None if no lead is needed.

        Returns:
            The result of `work`.

        Raises:
            LeadershipLostError: another gateway has taken the lead; nothing has changed.
            BusyError: the transaction collided with others too often.
            UnavailableError: the database does not answer.
            NobackfillError: as `work`. If the state is not shared, what `work` did before stays.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return work()

    def take_leadership(self) -> Leadership | None:
        """Take the lead of an activation.

        Returns:
            The lead, which the caller closes; None if another gateway has it.

        Raises:
            UnavailableError: the database does not answer.
            BusyError: the record of the lead is locked for too long, or this gateway may not write.
            CannotWriteError: the database cannot write.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return Leadership()

    def end_leadership(self) -> None:
        """Forget the activation under way, and end the lead of the gateway that runs it; without
        one nothing changes.

        In one process, the thread that runs the activation is not stopped.

        Raises:
            CannotWriteError: the state cannot be written.
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            VerificationError: the state in the database is damaged, or a newer version wrote it.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        if self.current.activation is not None:
            self.change(activation=None)

    def block_other_gateways(self, seconds: float) -> AbstractContextManager[None]:
        """Keep other gateways from activating, rolling back or retiring a release during a block.

        It keeps them from creating a gallery, too. Without a shared state it does nothing.

        Args:
            seconds: longest time to wait for another gateway; at least 1 ms is waited.

        Raises:
            BusyError: another gateway took longer.
            UnavailableError: the database does not answer.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return nullcontext()

    def last_upgrade_record(self, gallery: str) -> str | None:
        """Return the saved record of a gallery's last upgrade, of any gateway.

        Args:
            gallery: name of the gallery.

        Returns:
            The record as JSON; None without one, for an unknown gallery, or if the state is not
            shared.

        Raises:
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            ConfigurationError: the database refuses the statement, as without rights.
        """
        return None

    def save_upgrade_record(self, gallery: str, job: str | None) -> None:  # noqa: B027 - optional: only shared states save it
        """Save the record of a gallery's upgrade for other gateways, in place of an earlier one;
        None deletes it.

        Does nothing if the state is not shared.

        Args:
            gallery: name of the gallery.
            job: the record as JSON; None deletes it.

        Raises:
            BusyError: the database is busy.
            UnavailableError: the database does not answer.
            CannotWriteError: the database cannot write.
            ConfigurationError: the database refuses the statement, as without rights.
        """

    def record_audit(self, actor: str, action: str, subject: str) -> None:
        """Record who did what in the audit and in the log.

        An entry that cannot be written to the audit is only in the log.

        Within `transact` of a shared state, the entry is lost if the transaction fails; work that
        runs again is logged again.

        Args:
            actor: name of the caller's token.
            action: the verb, such as activate.
            subject: the release or gallery.
        """
        log.info("audited", who=actor, what=action, of_what=subject)
        try:
            self._keep_deed(AuditEntry(time.time(), actor, action, subject))
        except NobackfillError as error:
            log.error(
                "an audit entry was not written; the audited call itself went on", error=str(error)
            )

    @abstractmethod
    def _keep_deed(self, deed: "AuditEntry") -> None:
        """Append an entry to the audit.

        Raises:
            CannotWriteError: the entry cannot be written.
            UnavailableError: the database does not answer.
        """

    @abstractmethod
    def audit_entries(self) -> "list[AuditEntry]":
        """Return the latest entries of the audit, at most MAX_AUDIT_ENTRIES, latest last; empty
        without any.

        An entry that a kill or a full disk has cut is left out.

        Raises:
            UnavailableError: the database does not answer.
            BusyError: the database is busy.
            VerificationError: the file of the audit cannot be read.
            ConfigurationError: the database refuses the statement, as without rights.
        """


class AuditEntry(NamedTuple):
    """Hold one entry of the audit.

    Attributes:
        time: Unix time of the call.
        who: name of the caller's token; empty without tokens, local for a command.
        what: the verb, such as activate.
        of_what: the release or gallery.
    """

    time: float
    who: str
    what: str
    of_what: str


class StateFile(GatewayState):
    """Keep the state of one gateway in a file that is replaced atomically."""

    def __init__(self, path: Path) -> None:
        """Read the state; nothing is written, and the file is not locked.

        Args:
            path: the file; a missing one means an empty state. Its folder need not exist before the
                first change.

        Raises:
            VerificationError: the file is damaged, cannot be read, or a newer version wrote it.
        """
        self._path, self._audit_path = path, path.with_name(AUDIT)
        try:
            state = parse_state(
                path.read_bytes(), str(path), read_writer_version(path.with_name(WRITER))
            )
        except FileNotFoundError:
            state = State()
        except OSError as error:
            raise VerificationError(
                f"{path}: the gateway's state cannot be read ({error.strerror}); check its "
                "permissions and the disk"
            ) from error
        super().__init__(state)
        self._lock = threading.Lock()
        self._is_noted = False
        # Reserved space, so that an activation's end can be recorded on a full disk.
        self._spare = path.with_name(f"{path.name}.spare")

    def _keep_deed(self, deed: AuditEntry) -> None:
        # json.dumps writes ASCII, so a cut line cannot end within a character.
        line = json.dumps(deed._asdict()).encode() + b"\n"
        with self._lock:
            if _is_cut(self._audit_path):
                # Start a new line: appended to a cut line, this entry would be lost with it.
                line = b"\n" + line
            durable.append_bytes(self._audit_path, line, 0o600)

    def audit_entries(self) -> list[AuditEntry]:
        """Return the latest entries of the audit, at most MAX_AUDIT_ENTRIES, latest last; empty
        without a file.

        An entry that a kill or a full disk has cut is left out. The whole file is read at each
        call.

        Raises:
            VerificationError: the file cannot be read.
        """
        try:
            lines = self._audit_path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise VerificationError(
                f"{self._audit_path}: the audit cannot be read ({error.strerror}); check its "
                "permissions and the disk"
            ) from error
        deeds: list[AuditEntry] = []
        for line in reversed(lines):
            if len(deeds) == MAX_AUDIT_ENTRIES:
                break
            # Skip a line that a kill or a full disk has cut.
            with suppress(ValueError, TypeError):
                deeds.append(AuditEntry(**json.loads(line)))
        return deeds[::-1]

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        """Replace fields by values that depend on the present state, atomically and durably;
        `current` then has them.

        Changes of several threads wait for each other. Values that are there already write nothing.
        While an activation is under way, some space is reserved, so that its end can be recorded on
        a full disk.

        Args:
            values_of: computes the new values from the state; called once, under the lock, so it
                must not change the state: that would wait for ever. Its errors pass through.

        Returns:
            The new state.

        Raises:
            CannotWriteError: the state cannot be written; `current` is unchanged, and so is the
                file, unless only its folder could not be synced or reserved space not be freed.
            pydantic.ValidationError: a name is no field of State, or a value has the wrong type.
                The state is unchanged.
        """
        with self._lock:
            new = State.model_validate({**dict(self.current), **values_of(self.current)})
            if new == self.current:
                return new
            content = new.model_dump_json(indent=1).encode() + b"\n"
            self._write(content, reserves_space=new.activation is not None)
            self.current = new
            return new

    def _note_writer(self) -> None:
        """Record which version writes the state.

        Raises:
            CannotWriteError: the record cannot be written.
        """
        path, own = self._path.with_name(WRITER), version("nobackfill")
        if not self._is_noted and read_writer_version(path) != own:
            durable.write_file(path, json.dumps({"nobackfill": own}).encode() + b"\n", 0o600)
        self._is_noted = True

    def _write(self, content: bytes, *, reserves_space: bool) -> None:
        """Write the state, from the reserved space if the disk is full.

        Args:
            content: the state as JSON.
            reserves_space: an activation is under way in this state; its reserved space is made or
                kept.

        Raises:
            CannotWriteError: the state cannot be written.
        """
        if reserves_space and not self._spare.exists():
            durable.write_file(self._spare, bytes(len(content) + _SPARE), 0o600)
        if reserves_space or not self._spare.exists():
            # Not at the end of an activation: it must be recorded on a full disk as well.
            self._note_writer()
        try:
            durable.write_file(self._path, content, 0o600)
        except CannotWriteError:
            if reserves_space or not self._spare.exists():
                raise
            durable.write_file_over_spare(self._spare, self._path, content)
        if not reserves_space:
            durable.remove_tree(self._spare)


def read_writer_version(path: Path) -> object:
    """Read the version that wrote the files in a folder, from the file `written-by.json` there.

    Args:
        path: that file.

    Returns:
        The version, unchecked; None if the file is missing, unreadable or of another form.
    """
    try:
        record = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return record.get("nobackfill") if isinstance(record, dict) else None


def _is_cut(path: Path) -> bool:
    """Tell whether a file's last line lacks its line break; False for a missing or empty file.

    Raises:
        CannotWriteError: the file cannot be read.
    """
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
            f"{path}: this file cannot be read ({error.strerror}), so the gateway does not append "
            "to it; check its permissions and the disk"
        ) from error
