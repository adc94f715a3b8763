"""One migration of a table: decide, write the new vectors, flip; or leave the table untouched.

A migration lives in a working folder. Its file `migration.json` says what was asked for and how far
it is; beside it lie the sample, the vectors of the sample, the map and the verdict. A killed
migration goes on from there, and every step may be repeated.

    deciding -> decided -> writing -> flipped -> finished
                  |           |          |
              untouched   taken back  taken back
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from nobackfill import durable
from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.embedding.embedder import open_embedder
from nobackfill.adopt.embedding.native_vectors import open_contents, open_native_vectors
from nobackfill.adopt.embedding.vector_folder import embed_into, read_items
from nobackfill.adopt.fitting import FitFiles, fit_and_judge
from nobackfill.adopt.maps import NEW_MODEL, load_map
from nobackfill.adopt.pairs import encode_ids, read_all, read_ids, sample_with
from nobackfill.adopt.sources.opening import open_items
from nobackfill.adopt.sources.source import MOST_NAME, Flippable, Reversible, Target
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
)

# "mapped": the items are gone, so searches ask both models from now on; nothing flips.
State = Literal[
    "deciding", "decided", "untouched", "writing", "mapped", "flipped", "finished", "taken back"
]
# Verdicts after which every item is re-embedded. `both` and `lazily` write mapped vectors first,
# so that searches can ask both models meanwhile.
_REEMBEDDED = ("both", "lazily", "re-embed")
# Column of the mapped vectors while every item is re-embedded.
_MAPPED = "_mapped"
# Seconds between two lines of progress.
_EVERY = 1.0


@dataclass(frozen=True)
class MigrationPlan:
    """The request of a migration, and its state.

    Attributes:
        source: Address of the table.
        new: The new model, as `embed --with` takes it.
        key: Column of unique keys; None for the primary key.
        vector: Column of the old vectors; None for the only one.
        column: Column of the texts; None where `items` says where the originals are.
        items: Folder of images or FILE.jsonl with the ids of the table.
        items_gone: The originals are gone, but for the sample.
        old: The old model; needed for queries alone.
        queries: FILE.jsonl of queries; `id` is the item to find.
        new_name: The new model's name at an endpoint.
        old_name: The old model's name at an endpoint.
        count: Items of the sample.
        to: Name of the new column until the flip.
        price: Money per 1,000 items or queries that the new model embeds; None where it is free.
        state: How far it is.
        way: The verdict; empty before it.
        mark: Digest of the new vectors in the store; empty before they are written.
    """

    source: str
    new: str
    key: str | None = None
    vector: str | None = None
    column: str | None = None
    items: str | None = None
    items_gone: bool = False
    old: str | None = None
    queries: str | None = None
    new_name: str | None = None
    old_name: str | None = None
    count: int = 2000
    to: str = ""
    price: float | None = None
    state: State = "deciding"
    way: str = ""
    mark: str = ""


_PLAN = TypeAdapter(MigrationPlan)
# Parts of a plan that the command line gives: a later run must give the same.
_REQUESTED = tuple(
    name
    for name in MigrationPlan.__dataclass_fields__
    if name not in ("state", "way", "mark", "vector", "to")
)


@dataclass(frozen=True)
class MigrationProgress:
    """How far a migration is: rows with a new vector, and rows that will have one."""

    plan: MigrationPlan
    rows: int
    total: int


class Migration:
    """A migration in its working folder. Methods raise what sources, models and `carry` raise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "migration.json"

    def plan(self) -> MigrationPlan:
        """Read the plan. Raises NotFoundError where there is none, InvalidInputError."""
        try:
            return _PLAN.validate_json(self._file.read_bytes())
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{self._folder}: no migration is here; start one with `nobackfill migrate SOURCE "
                "--new MODEL`, or name its folder with --work"
            ) from error
        except (OSError, ValidationError) as error:
            raise InvalidInputError(f"{self._file}: cannot be read ({error})") from error

    def decide(self, request: MigrationPlan, tell: Callable[[str], None]) -> list[str]:
        """Embed a sample by the new model, and judge the ways to go on.

        Args:
            request: What the command line asks for.
            tell: Called with a line before each step that takes time.

        Returns:
            The verdict, line by line. The plan is then "decided", or as it was where an earlier run
            has decided.

        Raises:
            AlreadyExistsError: The folder has a migration of something else.
            InvalidInputError: A store that cannot flip, a password in the address.
            BusyError: Another process works in this folder, or `pause` was called.
        """
        _refuse_password(request.source)
        if (request.column is None) == (request.items is None):
            raise InvalidInputError(
                "expected --column NAME or --items PATH, and not both: what the new model embeds"
            )
        durable.make_dir(self._folder)
        with self._locked():
            self._pausing.unlink(missing_ok=True)
            if self._file.exists():
                found = self.plan()
                different = [
                    name for name in _REQUESTED if getattr(found, name) != getattr(request, name)
                ]
                if different:
                    raise AlreadyExistsError(
                        f"{self._folder}: holds another migration ({', '.join(different)} differ); "
                        "give this one a folder of its own with --work"
                    )
                state = self._state(found, self._source(found))
                if state == "finished":
                    raise PreconditionError(
                        f"{self._folder}: this migration is finished; start another one in a "
                        "folder of its own with --work"
                    )
                if found.state == state == "flipped":
                    raise PreconditionError(
                        f"{self._folder}: this migration is flipped; `migrate finish` drops the "
                        "old vectors, `migrate back` gives them back"
                    )
                if found.state in ("writing", "decided") and self._verdict.is_file():
                    return self._verdict.read_text("utf-8").splitlines()
            source = self._source(request)
            name = source.flip_name
            plan = replace(request, vector=source.vector, to=f"{name}_new", state="deciding")
            if len((plan.to + _MAPPED).encode()) > MOST_NAME:
                raise InvalidInputError(
                    f"{name}: expected a name of at most "
                    f"{MOST_NAME - len('_new' + _MAPPED)} bytes, as those of the new vectors add "
                    f"'_new{_MAPPED}' to it; use `fit`, then `carry --to NAME`"
                )
            self._save(plan)
            lines = self._judge(plan, source, tell)
            durable.write_file(self._verdict, "\n".join(lines).encode(), 0o600)
            return lines

    def write(self, tell: Callable[[str], None]) -> CarryResult:
        """Do what the verdict says, and flip.

        Args:
            tell: Called with a line of progress about once a second.

        Returns:
            What was written. The plan is then "flipped", or "untouched" for the verdicts "stay"
            and "switch"; "switch" notes the new model in the column's comment.

        Raises:
            BusyError: Another process works in this folder, or `pause` was called.
        """
        with self._locked():
            plan = self.plan()
            if plan.way in ("stay", "switch"):
                if plan.way == "switch":
                    model = open_embedder(plan.new, name=plan.new_name).fingerprint
                    self._source(plan).name_model(model)
                self._save(replace(plan, state="untouched"))
                return CarryResult(0, 0, [])
            self._check_pause()
            self._counter = _Counter(tell, self._check_pause)
            source = self._source(plan)
            done = self._map_only(plan, source) if self._maps(plan) else self._reembed(plan, source)
            if plan.way == "both" and plan.items_gone:
                self._save(replace(self.plan(), state="mapped"))
                return done
            self._save(replace(self.plan(), state="flipped"))
            return done

    def _map_only(self, plan: MigrationPlan, source: Reversible) -> CarryResult:
        """Write mapped vectors and flip to them; the flip is left out where both models answer."""
        mapping = load_map(self._map)
        flip = plan.way == "map"
        target = Target(
            plan.to, mapping.dims[1], mapping.digest, mapping.facts.get(NEW_MODEL), reversible=flip
        )
        if self._has_flipped(plan, source, target):
            return CarryResult(0, source.count(), [])
        self._counter.begin("mapped", source.count())
        done = carry(source, target, mapping, progress=self._counter, flip=flip)
        if not flip:
            _build_indexes(source, target)
        return done

    def _reembed(self, plan: MigrationPlan, source: Reversible) -> CarryResult:
        """Write native vectors and flip to them, with mapped ones to search by until then."""
        maker = open_native_vectors(
            source,
            open_contents(source, plan.column, plan.items),
            model=plan.new,
            model_name=plan.new_name,
            folder=self._new,
            pause=self._check_pause,
        )
        target = maker.target(plan.to, reversible=True)
        mapped = plan.to + _MAPPED
        if self._has_flipped(plan, source, target):
            source.rollback(mapped)
            return CarryResult(0, source.count(), [])
        if plan.way in ("both", "lazily"):
            mapping = load_map(self._map)
            second = Target(mapped, mapping.dims[1], mapping.digest, mapping.facts.get(NEW_MODEL))
            self._counter.begin("mapped", source.count())
            carry(source, second, mapping, progress=self._counter)
            _build_indexes(source, second)
            self._counter.tell(
                f"searches can ask both models now: Dual.open(..., carried={mapped!r}) of "
                "nobackfill.serve"
            )
        self._counter.begin("re-embedded", source.count())
        done = carry(source, target, maker, progress=self._counter, flip=True)
        self._source(plan).rollback(mapped)
        return done

    def _has_flipped(self, plan: MigrationPlan, source: Reversible, target: Target) -> bool:
        """Note what is being written; whether an earlier run was killed after its flip."""
        self._save(replace(plan, state="writing", mark=target.mark))
        return source.flip_state(target.mark) in ("flipped", "finished")

    @staticmethod
    def _maps(plan: MigrationPlan) -> bool:
        return plan.way == "map" or (plan.way == "both" and plan.items_gone)

    @staticmethod
    def _source(plan: MigrationPlan) -> Reversible:
        source = open_items(plan.source, plan.source, key=plan.key, vector=plan.vector)
        if not isinstance(source, Reversible):
            raise InvalidInputError(
                f"{source.facts().name}: expected a store that migrate can flip: PostgreSQL "
                "with pgvector, LanceDB, or SQLite with sqlite-vec; for others use `fit`, then "
                "`carry`"
            )
        return source

    def status(self) -> MigrationProgress:
        """Return how far the migration is, from the table itself."""
        plan = self.plan()
        if plan.state not in ("writing", "decided", "flipped"):
            return MigrationProgress(plan, 0, 0)
        source = self._source(plan)
        plan = replace(plan, state=self._state(plan, source))
        if plan.state not in ("writing", "decided"):
            return MigrationProgress(plan, 0, 0)
        return MigrationProgress(plan, source.count_vectors(plan.to), source.count())

    def pause(self) -> None:
        """Let the running migration stop after the rows that it embeds or writes.

        Raises PreconditionError where none is running.
        """
        self.plan()
        try:
            with self._locked():
                pass
        except BusyError:
            durable.write_file(self._pausing, b"", 0o600)
            return
        raise PreconditionError(f"{self._folder}: no process works on this migration")

    def back(self, *, lose: bool = False) -> int:
        """Take the migration back: remove what was written, or give the old vectors their name.

        Args:
            lose: Go on where rows were written since the flip and have no old vector.

        Returns:
            How many rows have no vector any more.
        """
        self.plan()
        with self._locked():
            plan = self.plan()
            source = self._source(plan)
            state = self._state(plan, source)
            if state == "finished":
                raise PreconditionError(
                    f"{self._folder}: finished: the old vectors are dropped, so nothing can be "
                    "taken back"
                )
            lost = source.flip_back(plan.to, lose=lose) if state == "flipped" else 0
            self._remove(plan, source, plan.to, plan.to + _MAPPED)
            self._save(replace(plan, state="taken back"))
            return lost

    def finish(self) -> None:
        """Drop the old vectors after the flip. Nothing can be taken back then."""
        self.plan()
        with self._locked():
            plan = self.plan()
            source = self._source(plan)
            state = self._state(plan, source)
            if state not in ("flipped", "finished"):
                raise PreconditionError(
                    f"{self._folder}: expected a flipped migration, found one that is {state}; "
                    "nothing was dropped"
                )
            self._remove(plan, source, plan.to + _MAPPED)
            if state == "flipped":
                source.drop_old()
            self._save(replace(plan, state="finished"))

    def _state(self, plan: MigrationPlan, source: Reversible) -> State:
        """Return the state that the table shows: a kill may have come before it was saved.

        Raises PreconditionError where a flip is saved of which the table says nothing.
        """
        if plan.state not in ("writing", "flipped"):
            return plan.state
        found = source.flip_state(plan.mark)
        if found in ("flipped", "finished"):
            return found
        if plan.state == "writing":
            return "writing"
        if found == "old":
            return "taken back"
        name = source.facts().name
        raise PreconditionError(
            f"{name}: its comment does not name this migration any more, so nothing was changed; "
            "if its vectors are still those of this migration, write it again: COMMENT ON COLUMN "
            f"{name} IS {json.dumps({'carried': plan.mark})!r}"
        )

    def _remove(self, plan: MigrationPlan, source: Reversible, *columns: str) -> None:
        """Remove new columns, but none that another migration or `carry` has made."""
        ours = {plan.mark} if plan.mark else set[str]()
        if ours and self._map.is_file():
            ours.add(load_map(self._map).digest)
        for column in columns:
            if source.mark_of(column) in ours:
                source.rollback(column)

    def _judge(
        self, plan: MigrationPlan, source: Reversible, tell: Callable[[str], None]
    ) -> list[str]:
        tell(f"sampling {plan.count} of {source.count()} items")
        ids = self._folder / "sample.txt"
        if not ids.is_file():
            rows = read_all(source)
            # `fit` judges by queries whose item is in the sample.
            wanted = read_items(plan.queries, column="text").ids if plan.queries else []
            chosen = sample_with(rows, min(plan.count, len(rows)), wanted)
            durable.write_file(ids, encode_ids(chosen, plan.source).encode(), 0o600)
        only = read_ids(ids)
        tell(f"embedding {len(only)} items by {plan.new}")
        where = plan.items or plan.source
        key = None if plan.items else plan.key
        items = read_items(
            where, column=plan.column or "text", key=key, vector=plan.vector, only=only
        )
        embedder = open_embedder(plan.new, name=plan.new_name)
        counter = _Counter(tell, self._check_pause)
        counter.begin("embedded", len(only))
        embed_into(self._new, items, embedder, progress=counter)
        by_old = by_new = None
        if plan.queries is not None and plan.old is not None:
            tell("embedding the queries by both models")
            queries = read_items(plan.queries, column="text")
            by_old, by_new = (str(self._folder / f"queries-{side}") for side in ("old", "new"))
            for folder, model, name in (
                (by_old, plan.old, plan.old_name),
                (by_new, plan.new, plan.new_name),
            ):
                embed_into(Path(folder), queries, open_embedder(model, name=name, queries=True))
        self._check_pause()
        tell(f"comparing the options on {len(only)} items; nothing is written yet")
        files = FitFiles(self._map, None, self._folder / "joining.npz", self._page)
        verdict = fit_and_judge(
            plan.source,
            str(self._new),
            files,
            by_old,
            by_new,
            not plan.items_gone,
            key=plan.key,
            vector=plan.vector,
        )
        way = str(verdict.answer["way"])
        self._save(replace(plan, state="decided", way=way))
        own_steps = set(map(str, verdict.answer.get("steps") or []))  # type: ignore[call-overload]
        lines = [line for line in verdict.lines if line not in own_steps]
        if plan.price is not None and way in _REEMBEDDED:
            money = plan.price * (source.count() - len(items.ids)) / 1000
            lines.append(f"re-embedding the rest costs about {money:.2f} at the price given")
        return lines

    def _check_pause(self) -> None:
        if self._pausing.exists():
            raise BusyError("paused; run the same `nobackfill migrate` again to go on")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as locks:
            try:
                locks.enter_context(durable.lock(self._folder / "lock"))
            except BusyError as error:
                raise BusyError(
                    f"{self._folder}: another process works on this migration; stop it with "
                    "`nobackfill migrate pause`, or wait"
                ) from error
            yield

    def _save(self, plan: MigrationPlan) -> None:
        durable.write_file(self._file, json.dumps(asdict(plan), indent=1).encode(), 0o600)

    @property
    def _new(self) -> Path:
        return self._folder / "new"

    @property
    def _map(self) -> Path:
        return self._folder / "map.npz"

    @property
    def _page(self) -> Path:
        return self._folder / "verdict.html"

    @property
    def _verdict(self) -> Path:
        return self._folder / "verdict.txt"

    @property
    def _pausing(self) -> Path:
        return self._folder / "pause"


class _Counter:
    """Tells the number, the rate and the time left, about once a second."""

    def __init__(self, tell: Callable[[str], None], check: Callable[[], None]) -> None:
        self.tell, self._check = tell, check
        self.begin("written", 0)

    def begin(self, verb: str, total: int) -> None:
        self._verb, self._total = verb, total
        self._started, self._last = time.monotonic(), 0.0

    def __call__(self, rows: int) -> None:
        now = time.monotonic()
        if now - self._last >= _EVERY or rows >= self._total:
            self._last = now
            rate = rows / max(1e-9, now - self._started)
            left = max(0, self._total - rows) / max(1e-9, rate)
            self.tell(
                f"{rows} of {self._total} rows {self._verb}, {rate:.0f} a second, {left:.0f} s left"
            )
        self._check()


def _build_indexes(source: Reversible, target: Target) -> None:
    second = source.open_target(target)
    if isinstance(second, Flippable):
        with second.prepare_flip():
            pass


def _refuse_password(source: str) -> None:
    """Raise InvalidInputError for an address with a password, which the folder would keep."""
    try:
        password = urlsplit(source).password
    except ValueError:
        password = None
    if password or "password=" in source:
        raise InvalidInputError(
            "SOURCE: expected no password in the address, which is kept in the working folder; "
            "put it in ~/.pgpass or PGPASSWORD"
        )
