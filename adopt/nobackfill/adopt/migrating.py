"""One migration of a table: decide, write the new vectors, flip; or leave the table untouched.

A migration lives in a working folder. Its file `migration.json` has the request and the state. The
folder also holds the sample, the vectors of the sample, the map and the verdict. A killed migration
continues from there, and every step may be repeated.

    deciding -> decided -> writing -> flipped -> finished
                  |           |          |
              untouched   taken back  taken back
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from nobackfill import durable
from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.embedding.embedder import Embedder, open_embedder
from nobackfill.adopt.embedding.native_vectors import (
    native_vector_digest,
    open_native_vectors,
    open_originals,
    originals_name,
)
from nobackfill.adopt.embedding.vector_folder import (
    EmbeddingRun,
    ItemList,
    embed_into,
    read_items,
)
from nobackfill.adopt.fitting import LEAST_QUERIES, FitFiles, fit_and_judge
from nobackfill.adopt.maps import NEW_MODEL, load_map
from nobackfill.adopt.page import format_duration
from nobackfill.adopt.pairs import encode_ids, has_line_break, read_ids, sample_source
from nobackfill.adopt.sources.flipping import FlippingSource
from nobackfill.adopt.sources.opening import POSTGRESQL_SCHEMES, open_item_vectors
from nobackfill.adopt.sources.source import (
    LONGEST_NAME_BYTES,
    Flippable,
    Reversible,
    Target,
    old_name_after_flip,
)
from nobackfill.adopt.verdict import ADAPTER_OPTION
from nobackfill.errors import (
    AlreadyExistsError,
    BusyError,
    InvalidInputError,
    NotFoundError,
    PreconditionError,
    join_few,
)
from nobackfill.release.manifest import join_validation_problems

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
# Items of the sample, unless the command line gives another number.
SAMPLE = 2000


@dataclass(frozen=True)
class MigrationPlan:
    """The request of a migration, and its state. The aliases are the keys of `migration.json`.

    Attributes:
        source_address: Address of the table.
        new_model: The new model, as `embed --with` takes it.
        key_column: Column of unique keys; None for the primary key.
        vector_column: Column of the old vectors; None for the only one.
        text_column: Column of the texts; None where `items_path` says where the originals are.
        items_path: Folder of images or FILE.jsonl with the ids of the table.
        originals_gone: The originals are gone, but for the sample.
        old_model: The old model; needed for queries alone.
        queries_file: FILE.jsonl of queries; `id` is the item to find.
        new_model_name: The new model's name at an endpoint.
        old_model_name: The old model's name at an endpoint.
        sample_size: Items of the sample; None in a request that leaves it as it is (2,000 at
            first).
        new_column: Name of the new column until the flip.
        price_per_1000: Money per 1,000 items that the new model embeds; None where it is free, and
            in a request that leaves it as it is.
        natives_file: The file of `Dual` with native vectors and with the items that searches
            wanted; None for `natives.db` in the working folder.
        row_condition: Condition of the rows in SQL; None for all. Then `new_column` is a table of
            their own.
        state: The last step that was completed.
        verdict: The verdict; empty before it.
        computer_digest: Digest of the new vectors in the store; empty before they are written.
        earlier_flip_digest: Digest of the vectors that the table had at the verdict, if a flip put
            them there; empty if none did, None if an earlier version did not record it.
        old_model_gone: The old model is gone.
    """

    source_address: Annotated[str, Field(alias="source")]
    new_model: Annotated[str, Field(alias="new")]
    key_column: Annotated[str | None, Field(alias="key")] = None
    vector_column: Annotated[str | None, Field(alias="vector")] = None
    text_column: Annotated[str | None, Field(alias="column")] = None
    items_path: Annotated[str | None, Field(alias="items")] = None
    originals_gone: Annotated[bool, Field(alias="items_gone")] = False
    old_model: Annotated[str | None, Field(alias="old")] = None
    queries_file: Annotated[str | None, Field(alias="queries")] = None
    new_model_name: Annotated[str | None, Field(alias="new_name")] = None
    old_model_name: Annotated[str | None, Field(alias="old_name")] = None
    sample_size: Annotated[int | None, Field(alias="count")] = None
    new_column: Annotated[str, Field(alias="to")] = ""
    price_per_1000: Annotated[float | None, Field(alias="price")] = None
    natives_file: Annotated[str | None, Field(alias="natives")] = None
    row_condition: Annotated[str | None, Field(alias="where")] = None
    state: State = "deciding"
    verdict: Annotated[str, Field(alias="way")] = ""
    computer_digest: Annotated[str, Field(alias="mark")] = ""
    earlier_flip_digest: Annotated[str | None, Field(alias="flip_before")] = None
    old_model_gone: Annotated[bool, Field(alias="old_gone")] = False


_PLAN = TypeAdapter(MigrationPlan)
# Parts of a request that a later run must repeat, with their options.
_FIXED = {
    "source_address": "SOURCE", "new_model": "--new", "key_column": "--key",
    "text_column": "--column", "items_path": "--items", "originals_gone": "--items-gone",
    "old_model_gone": "--old-gone", "old_model": "--old", "queries_file": "--queries",
    "new_model_name": "--new-name", "old_model_name": "--old-name", "row_condition": "--where",
}  # fmt: skip


@dataclass(frozen=True)
class _Inputs:
    """The opened inputs of a verdict.

    Attributes:
        source: The table.
        new: The new model.
        old: The old model, for queries; None without queries.
        queries: The test queries; None without them.
    """

    source: Reversible
    new: Embedder
    old: Embedder | None
    queries: ItemList | None


@dataclass(frozen=True)
class MigrationProgress:
    """The progress of a migration.

    Attributes:
        plan: The plan, with the state that the table shows.
        migrated_rows: Rows with a new vector; 0 in states in which no vectors are written.
        total_rows: Rows that will have one; 0 in states in which no vectors are written.
    """

    plan: MigrationPlan
    migrated_rows: int
    total_rows: int


class Migration:
    """A migration in its working folder.

    Nothing is read or written until a method is called. Each call opens the table again, so that
    every method but `plan`, `pause` and `adapter` may also raise UnavailableError (the server does
    not answer), NotPermittedError (it refuses the user), NotFoundError (the table or the file is
    gone) and InvalidInputError (the table lacks a column, or its store cannot flip).

    Args:
        folder: The working folder; `decide` creates it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "migration.json"

    def plan(self) -> MigrationPlan:
        """Read the plan from the working folder.

        The state is the saved one; a kill may have prevented the saving. `status` asks the table.

        Raises:
            NotFoundError: The folder has no migration.
            InvalidInputError: The file of the plan cannot be read, or is not a plan.
        """
        try:
            return _PLAN.validate_json(self._file.read_bytes())
        except FileNotFoundError as error:
            raise NotFoundError(
                f"{self._folder}: no migration is here; start one with `nobackfill migrate SOURCE "
                "--new MODEL`, or name its folder with --work"
            ) from error
        except (OSError, ValidationError) as error:
            why = join_validation_problems(error) if isinstance(error, ValidationError) else error
            raise InvalidInputError(
                f"{self._file}: the state of the migration cannot be read ({why}); restore this "
                "file from a copy"
            ) from error

    def decide(self, request: MigrationPlan, print_line: Callable[[str], None]) -> list[str]:
        """Embed a sample by the new model, and compare the options.

        It creates the folder, saves the plan, and removes an earlier request to pause. If the
        table, a model or the file of queries cannot be opened, it creates nothing. If an earlier
        run embedded nothing, another request replaces its plan. A run that continues repeats the
        verdict of the earlier run. It embeds only what the earlier run left. Another number of
        items makes a new verdict, unless vectors are being written. Another price changes the costs
        alone. No vector of the table changes. The sample is drawn by a fixed seed, and up to half
        of it are items of the queries.

        Args:
            request: The request of the command line.
            print_line: Called with a line before each step that takes time, and with lines of
                progress.

        Returns:
            The verdict, line by line. The plan is then "decided", or "writing" as before.

        Raises:
            AlreadyExistsError: The folder has another migration, the table already has the new
                model's vectors, or another collection has the name of the new vectors.
            PreconditionError: The migration in the folder is flipped or finished. The table's
                comment no longer names a flip that was saved, or an alias leads elsewhere.
            InvalidInputError: The store cannot flip, or the address has a password. Not exactly one
                of `text_column` and `items_path` is set, a name is too long, the old model's
                vectors have another dimension than the stored ones, or the sample cannot be judged,
                as by `fit_and_judge`. No row has a vector, the model can embed no item, or fewer
                than 20 queries have their item among the rows.
            BusyError: Another process works in this folder, or `pause` was called. An endpoint is
                still busy after its patience, or others hold the store.
            NotFoundError: The table, the items, a model or the file of queries does not exist.
            UnavailableError: The table's server or the endpoint of a model does not answer.
            NotPermittedError: The server or the endpoint refuses the user.
            ConfigurationError: The model's declaration or an address is not valid, or a package is
                not installed.
            VerificationError: The model returns no usable vectors.
            CannotWriteError: The folder cannot be written.
            IncompatibleSpaceError: A model has changed since an earlier run embedded a part of the
                sample.
            OSError: A file of a model cannot be read.
            Exception: Any other error of the code of a model `module:function`, when it is
                imported, and of `print_line`.
        """
        _refuse_password(request.source_address)
        if (request.text_column is None) == (request.items_path is None):
            raise InvalidInputError(
                "expected either --column NAME or --items PATH, which name the texts or images "
                "that the new model embeds, got both or neither; give exactly one"
            )
        inputs = None if self._file.exists() else self._open(request)
        durable.make_dir(self._folder)
        with self._locked():
            self._pausing.unlink(missing_ok=True)
            former = self._former(request) if self._file.exists() else None
            request = _complete(request, former)
            if former is not None and self._verdict.is_file():
                writing = former.state == "writing"
                if writing or (
                    former.state == "decided" and former.sample_size == request.sample_size
                ):
                    if former.sample_size != request.sample_size:
                        print_line(
                            f"-n {request.sample_size} is ignored: vectors are being written by "
                            f"the verdict of {former.sample_size} items; `nobackfill migrate "
                            "back` removes these vectors"
                        )
                    plan = replace(
                        former,
                        price_per_1000=request.price_per_1000,
                        natives_file=request.natives_file,
                    )
                    self._save(plan)
                    lines = self._verdict.read_text("utf-8").splitlines()
                    return lines + self._cost(plan, self._source(plan))
            inputs = inputs or self._open(request)
            source = inputs.source
            name = source.flip_name
            plan = replace(
                request,
                vector_column=source.vector,
                new_column=f"{name}_new",
                state="deciding",
                earlier_flip_digest=source.flip_digest() or "",
            )
            if len((plan.new_column + _MAPPED).encode()) > LONGEST_NAME_BYTES:
                raise InvalidInputError(
                    f"{name}: expected a name of at most "
                    f"{LONGEST_NAME_BYTES - len('_new' + _MAPPED)} bytes, because the names of "
                    f"the new vectors add '_new{_MAPPED}' to it; shorten the name, or use "
                    "`nobackfill fit`, then `nobackfill carry --to NAME`"
                )
            if isinstance(source, FlippingSource):
                if obstacles := source.flip_obstacles(Target(plan.new_column, 1, "")):
                    raise InvalidInputError(
                        f"{name}: searches cannot flip to the new vectors: {'; '.join(obstacles)}"
                    )
                source.refuse_other(plan.new_column)
            if former is not None and former.sample_size != plan.sample_size:
                (self._sample).unlink(missing_ok=True)
            self._save(plan)
            plan, lines = self._judge(plan, inputs, print_line)
            durable.write_file(self._verdict, "\n".join(lines).encode(), 0o600)
            self._save(plan)
            return lines + self._cost(plan, source)

    def _open(self, request: MigrationPlan) -> _Inputs:
        """Open the table, its items, the models and the queries, so that a wrong name is refused
        at once. The old model embeds the first query that it takes.

        Raises:
            AlreadyExistsError: The table already has the new model's vectors.
            InvalidInputError: The old model's vectors have another dimension than the stored ones,
                or it takes none of the first 1,000 queries.
        """
        source = self._source(request)
        open_originals(source, request.text_column, request.items_path)
        new = open_embedder(request.new_model, name=request.new_model_name)
        self._refuse_repetition(request, source, new)
        if request.queries_file is None or request.old_model is None:
            return _Inputs(source, new, None, None)
        old = open_embedder(request.old_model, name=request.old_model_name, queries=True)
        queries = read_items(request.queries_file, column="text")
        facts = source.facts()
        # The first query that the model takes; others are left out, as in the verdict.
        batches = EmbeddingRun(queries, old, 1, None).embed(range(len(queries.ids)))
        dim = next((vectors.shape[1] for _, vectors in batches), None)
        if None not in (facts.dim, dim) and facts.dim != dim:
            raise InvalidInputError(
                f"the model of --old, {request.old_model}, computes vectors of {dim} dimensions, "
                f"but {facts.name} has {facts.dim}; name the model that computed the stored vectors"
            )
        return _Inputs(source, new, old, queries)

    def _former(self, request: MigrationPlan) -> MigrationPlan | None:
        """Read the plan of an earlier run, and check that a request continues it.

        Returns:
            The plan; None if that run embedded nothing and the request differs. The sample is then
            removed, so that the request begins anew.

        Raises:
            AlreadyExistsError: The request differs in a part that cannot change.
            PreconditionError: The earlier migration is flipped or finished.
        """
        plan = self.plan()
        differences = [
            f"{option} was {_describe_option(getattr(plan, name))} and is now "
            f"{_describe_option(getattr(request, name))}"
            for name, option in _FIXED.items()
            if getattr(plan, name) != getattr(request, name)
        ]
        if differences and plan.state == "deciding" and not self._new.exists():
            self._sample.unlink(missing_ok=True)
            return None
        if differences:
            raise AlreadyExistsError(
                f"{self._folder}: holds another migration: {'; '.join(differences)}. Repeat the "
                "earlier options to continue it, or give the new migration a folder of its own "
                "with --work"
            )
        state = self._state(plan, self._source(plan))
        if state == "finished":
            raise PreconditionError(
                f"{self._folder}: this migration is finished; start another one in a folder of its "
                "own with --work"
            )
        if plan.state == state == "flipped":
            raise PreconditionError(
                f"{self._folder}: searches use the new vectors of this migration already; "
                "`nobackfill migrate finish` drops the old vectors, `nobackfill migrate back` "
                "restores them"
            )
        return plan

    def _refuse_repetition(
        self, plan: MigrationPlan, source: Reversible, embedder: Embedder
    ) -> None:
        """Raise AlreadyExistsError where a flip put the new model's vectors into the table."""
        mark = native_vector_digest(
            embedder.fingerprint, originals_name(plan.text_column, plan.items_path)
        )
        state = source.flip_state(mark)
        if state not in ("flipped", "finished"):
            return
        ending = (
            "the migration that wrote them is not finished: run `nobackfill migrate finish` or "
            "`nobackfill migrate back` with the --work of that migration"
            if state == "flipped"
            else "nothing is left to do"
        )
        raise AlreadyExistsError(
            f"{source.facts().name}: already holds the vectors of {plan.new_model}; {ending}"
        )

    def _cost(self, plan: MigrationPlan, source: Reversible) -> list[str]:
        """Write a sentence on the money that re-embedding costs; none without a price."""
        if plan.price_per_1000 is None or plan.verdict not in _REEMBEDDED:
            return []
        done = len(read_ids(self._sample))
        if plan.state == "writing":
            done = max(done, source.count_vectors(plan.new_column))
        rows = max(0, source.count() - done)
        money = plan.price_per_1000 * rows / 1000
        return [f"re-embedding the rest costs about {money:.2f} at the price given"]

    def write(self, print_line: Callable[[str], None]) -> CarryResult:
        """Execute the verdict, and flip. No other migration of the table runs meanwhile, in
        whatever working folder it is. After an error or a kill, the written vectors stay, and a
        second call continues. Call it after `decide`. After `undo` it begins anew.

        Args:
            print_line: Called with a line of progress about once a second.

        Returns:
            The numbers of vectors. The plan is then "flipped", or "untouched" for the verdicts
            "stay", "query adapter" and "switch"; "switch" writes the new model into the column's
            comment. For "both" with items that are gone it is "mapped".

        Raises:
            BusyError: Another process works in this folder or writes to the table by another one,
                or `pause` was called. Others change rows faster than this writes, or hold the table
                at the flip.
            PreconditionError: There is no verdict, because `decide` did not end. The table was
                flipped since the verdict, by another migration or by this one.
            UnavailableError: The server ended the session that keeps other migrations out. The
                server or a model's endpoint does not answer.
            CannotWriteError: The disk of the database or of the folder is full. Run it again.
            NotFoundError: The folder has no migration, or the table is gone. The items, the new
                model or a file of the folder are gone.
            InvalidInputError: The store cannot flip, items got no new vector, or old vectors have
                NaN or another dimension; see `carry`.
            AlreadyExistsError: The new name belongs to other data.
            VerificationError: The store does not hold the vectors that were written, or the model
                returns no usable ones.
            NotPermittedError: The server refuses the user.
            ConfigurationError: An address would send vectors or a password unencrypted, or an extra
                is not installed.
            IncompatibleSpaceError: The new model has changed since the verdict.
            OSError: A file of the new model cannot be read.
            Exception: Any other error of the code of a model `module:function`, when it is
                imported, and of `print_line`.
        """
        with self._alone() as (plan, source, check_lock):
            if not plan.verdict:
                raise PreconditionError(
                    f"{self._folder}: expected a migration with a verdict, found one in the state "
                    f"{plan.state!r}; nothing was written. Run `nobackfill migrate` again to "
                    "complete it"
                )
            self._check_same_vectors(plan, source)
            if plan.verdict in ("stay", ADAPTER_OPTION, "switch"):
                if plan.verdict == "switch":
                    model = open_embedder(plan.new_model, name=plan.new_model_name).fingerprint
                    source.record_model(model)
                self._save(replace(plan, state="untouched"))
                return CarryResult(0, 0, [])

            def check() -> None:
                self._check_pause()
                check_lock()

            check()
            self._counter = _Counter(print_line, check)
            done = self._map_only(plan, source) if self._maps(plan) else self._reembed(plan, source)
            if plan.verdict == "both" and plan.originals_gone:
                self._save(replace(self.plan(), state="mapped"))
                return done
            self._save(replace(self.plan(), state="flipped"))
            return done

    def _check_same_vectors(self, plan: MigrationPlan, source: Reversible) -> None:
        """Raise PreconditionError where another migration has flipped the table since the verdict.

        Its map would read vectors of another model.
        """
        mark = source.flip_digest() or ""
        # An earlier version recorded no digest. Only a run that was killed wrote
        # `plan.computer_digest`.
        own_flip = plan.state == "writing" and mark == plan.computer_digest
        if (
            plan.earlier_flip_digest is not None
            and mark != plan.earlier_flip_digest
            and not own_flip
        ):
            raise PreconditionError(
                f"{source.facts().name}: since this verdict, another migration has changed which "
                "vectors answer searches here; nothing was written. Remove the folder "
                f"{self._folder}, and start again"
            )

    def _map_only(self, plan: MigrationPlan, source: Reversible) -> CarryResult:
        """Write mapped vectors and flip to them; the flip is left out where both models answer."""
        mapping = load_map(self._map)
        flip = plan.verdict == "map"
        target = Target(
            plan.new_column,
            mapping.dims[1],
            mapping.digest,
            mapping.facts.get(NEW_MODEL),
            must_be_reversible=flip,
        )
        if self._has_flipped(plan, source, target):
            return CarryResult(0, source.count(), [])
        self._begin("mapped", source, plan.new_column, flip=flip)
        done = carry(source, target, mapping, progress=self._counter, flip=flip)
        if not flip:
            _build_indexes(source, target)
        return done

    def _reembed(self, plan: MigrationPlan, source: Reversible) -> CarryResult:
        """Write native vectors and flip to them.

        For "both" and "lazily", searches use mapped vectors until then, and the items that they
        want come first.
        """
        searched = plan.verdict in ("both", "lazily")
        natives = Path(plan.natives_file) if plan.natives_file else self._folder / "natives.db"
        maker = open_native_vectors(
            source,
            open_originals(source, plan.text_column, plan.items_path),
            model=plan.new_model,
            model_name=plan.new_model_name,
            folder=self._new,
            natives_file=natives if searched else None,
            pause=self._counter.check,
        )
        target = maker.target(plan.new_column, must_be_reversible=True)
        mapped = plan.new_column + _MAPPED
        if self._has_flipped(plan, source, target):
            source.drop_new_vectors(mapped)
            return CarryResult(0, source.count(), [])
        if searched:
            mapping = load_map(self._map)
            second = Target(mapped, mapping.dims[1], mapping.digest, mapping.facts.get(NEW_MODEL))
            self._begin("mapped", source, mapped, flip=False)
            carry(source, second, mapping, progress=self._counter)
            _build_indexes(source, second)
            self._counter.tell(
                "searches can ask both models now, by Dual of nobackfill.serve: "
                f"Dual.open(source, Path({str(self._map)!r}), Path({str(self._joining)!r}), "
                f"Path({str(natives)!r}), new_model, carried={mapped!r}, items=ITEMS)"
            )
        self._begin("re-embedded", source, plan.new_column, flip=True)
        done = carry(source, target, maker, progress=self._counter, flip=True)
        self._source(plan).drop_new_vectors(mapped)
        return done

    def _has_flipped(self, plan: MigrationPlan, source: Reversible, target: Target) -> bool:
        """Save that vectors of `target` are being written.

        Returns:
            Whether an earlier run flipped to them and was killed before it saved this.
        """
        self._save(replace(plan, state="writing", computer_digest=target.computer_digest))
        return source.flip_state(target.computer_digest) in ("flipped", "finished")

    def _begin(self, verb: str, source: Reversible, column: str, *, flip: bool) -> None:
        """Begin the progress of a column, with the rows that an earlier run has written."""
        next_step = "the index is built next, then the flip" if flip else "the index is built next"
        self._counter.begin(verb, source.count(), source.count_vectors(column), next_step=next_step)

    @staticmethod
    def _maps(plan: MigrationPlan) -> bool:
        return plan.verdict == "map" or (plan.verdict == "both" and plan.originals_gone)

    @staticmethod
    def _source(plan: MigrationPlan) -> Reversible:
        source = open_item_vectors(
            plan.source_address,
            plan.source_address,
            key=plan.key_column,
            vector=plan.vector_column,
            where=plan.row_condition,
        )
        if not isinstance(source, Reversible):
            raise InvalidInputError(
                f"{source.facts().name}: expected a store that migrate can flip: PostgreSQL with "
                "pgvector, Qdrant, Milvus, Chroma, LanceDB, or SQLite with sqlite-vec; for others "
                "use `nobackfill fit`, then `nobackfill carry`"
            )
        # It raises where the store cannot hold new vectors next to the old ones.
        _ = source.flip_name
        return source

    def status(self) -> MigrationProgress:
        """Read the progress of the migration from the table itself. Nothing is saved, and no lock
        is taken: another process may write meanwhile.

        A plan whose saved state is not "writing", "decided" or "flipped" is returned as it is,
        without a look at the table.

        Raises:
            NotFoundError: The folder has no migration. The table does not exist.
            PreconditionError: The table's comment does not name a flip that was saved, or an alias
                leads elsewhere.
            InvalidInputError: The plan cannot be read, or the table cannot be opened as its options
                say.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            ConfigurationError: An address would send vectors or a password unencrypted, or an extra
                is not installed.
            BusyError: Others hold the store, or its server has too many requests.
        """
        plan = self.plan()
        if plan.state not in ("writing", "decided", "flipped"):
            return MigrationProgress(plan, 0, 0)
        source = self._source(plan)
        plan = replace(plan, state=self._state(plan, source))
        if plan.state not in ("writing", "decided"):
            return MigrationProgress(plan, 0, 0)
        return MigrationProgress(plan, source.count_vectors(plan.new_column), source.count())

    def vector_names(self) -> tuple[str, str]:
        """Return the names of the new and of the old vectors after a flip.

        With `MigrationPlan.row_condition` no vectors have these names: the new ones are in the
        table that `new_column` names.

        Raises:
            NotFoundError: The folder has no migration. The table does not exist.
            InvalidInputError: The plan cannot be read, or the table cannot be opened as its options
                say.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            ConfigurationError: An address would send vectors or a password unencrypted, or an extra
                is not installed.
            BusyError: Others hold the store, or its server has too many requests.
        """
        plan = self.plan()
        name = plan.new_column.removesuffix("_new")
        return (
            (name, old_name_after_flip(name))
            if self._source(plan).flip_renames
            else (plan.new_column, name)
        )

    def pause(self) -> None:
        """Stop the running migration after the rows that it is embedding or writing.

        Returns at once; the other process ends with BusyError, which may take as long as one batch
        of the model. The request is a file `pause` in the folder, which the next `decide` removes.
        Until then, `write` raises BusyError where it has vectors to write.

        It makes a file `lock` in the folder if there is none.

        Raises:
            NotFoundError: The folder has no migration.
            PreconditionError: No process works on it.
            InvalidInputError: The file of the plan cannot be read.
            CannotWriteError: The folder cannot be written.
        """
        self.plan()
        try:
            with self._locked():
                pass
        except BusyError:
            durable.write_file(self._pausing, b"", 0o600)
            return
        raise PreconditionError(
            f"{self._folder}: no process works on this migration, so nothing was paused; "
            "`nobackfill migrate status` shows its state"
        )

    def undo(self, *, allow_loss: bool = False) -> int | None:
        """Undo the migration.

        Before the flip, remove the new vectors. After it, give the old vectors their name back, and
        remove the new ones. Columns of other migrations stay. The working folder stays; its state
        is then "taken back". A second call removes nothing more and returns None.

        Args:
            allow_loss: Whether rows may lose their only vector, which was written since the flip.

        Returns:
            The number of rows that lost their only vector; None if nothing was left to undo.

        Raises:
            NotFoundError: The folder has no migration. The table, or the old vectors after a flip,
                do not exist.
            PreconditionError: The migration is finished. The table's comment does not name a flip
                that was saved, or an alias leads elsewhere.
            InvalidInputError: Rows would lose their only vector and `allow_loss` is False, or the
                old vectors may be stale. Another object depends on the new vectors. The map of the
                folder cannot be read.
            NotPermittedError: Row-level security may hide rows from this role, or the server
                refuses the user.
            BusyError: Another process works in this folder or writes to the table by another one,
                or others hold the table.
            UnavailableError: The server does not answer.
            ConfigurationError: An address would send vectors or a password unencrypted, or an extra
                is not installed.
            CannotWriteError: The folder or the store cannot be written. The table may be changed by
                then; a second call continues.
        """
        with self._alone() as (plan, source, _):
            state = self._state(plan, source)
            if state == "finished":
                raise PreconditionError(
                    f"{self._folder}: the migration is finished: the old vectors are dropped, so "
                    "it cannot be undone. To return to the old model, migrate to it"
                )
            flipped = state == "flipped"
            lost = source.flip_back(plan.new_column, allow_loss=allow_loss) if flipped else 0
            removed = self._remove(plan, source, plan.new_column, plan.new_column + _MAPPED)
            self._save(replace(plan, state="taken back"))
            return lost if flipped or removed else None

    def finish(self) -> None:
        """Drop the old vectors after the flip. The migration cannot be undone then.

        A second call changes nothing. The mapped vectors of the migration are removed, too; the
        working folder stays.

        Raises:
            NotFoundError: The folder has no migration. The old vectors do not exist. The table does
                not exist.
            PreconditionError: The migration is not flipped. The table's comment does not name a
                flip that was saved, or an alias leads elsewhere.
            InvalidInputError: An object of the database still depends on the old vectors. The map
                of the folder cannot be read.
            BusyError: Another process works in this folder or writes to the table by another one,
                or others hold the table.
            UnavailableError: The server does not answer.
            NotPermittedError: The server refuses the user.
            ConfigurationError: An address would send vectors or a password unencrypted, or an extra
                is not installed.
            CannotWriteError: The folder or the store cannot be written. The table may be changed by
                then; a second call continues.
        """
        with self._alone() as (plan, source, _):
            state = self._state(plan, source)
            if state not in ("flipped", "finished"):
                raise PreconditionError(
                    f"{self._folder}: expected a migration whose new vectors answer searches, "
                    f"found one in the state {state!r}; nothing was dropped. Run `nobackfill "
                    "migrate` again to complete it"
                )
            self._remove(plan, source, plan.new_column + _MAPPED)
            if state == "flipped":
                source.drop_old()
            self._save(replace(plan, state="finished"))

    def _state(self, plan: MigrationPlan, source: Reversible) -> State:
        """Return the state that the table shows: a kill may have prevented the saving.

        Raises:
            PreconditionError: A flip is saved, and the store does not name it. An alias leads to
                another collection than the old and the new one.
        """
        if plan.state not in ("writing", "flipped"):
            return plan.state
        state = source.flip_state(plan.computer_digest)
        if state in ("flipped", "finished"):
            return state
        if state == "old" and isinstance(source, FlippingSource):
            source.refuse_moved(plan.new_column)
        if plan.state == "writing":
            return "writing"
        if state == "old":
            return "taken back"
        name, kind = source.facts().name, "COLUMN"
        if not plan.source_address.startswith(POSTGRESQL_SCHEMES):
            raise PreconditionError(
                f"{name}: the vectors that answer searches now are not those of this migration, so "
                "nothing was changed. Run `nobackfill migrate finish` or `nobackfill migrate back` "
                "with the --work of the migration that wrote them, then run this command again"
            )
        if plan.row_condition is not None:
            name, kind = plan.new_column.partition(":")[2], "TABLE"
        raise PreconditionError(
            f"{name}: the database's comment on this {kind.lower()} does not name this migration "
            "any more, so nothing was changed. If this migration wrote its vectors, write the "
            f"comment again: COMMENT ON {kind} {name} IS "
            f"{json.dumps({'carried': plan.computer_digest})!r}"
        )

    def _remove(self, plan: MigrationPlan, source: Reversible, *columns: str) -> bool:
        """Remove new columns, except those of another migration or of `carry`.

        Returns:
            Whether one was removed.
        """
        ours = {plan.computer_digest} if plan.computer_digest else set[str]()
        if ours and self._map.is_file():
            ours.add(load_map(self._map).digest)
        removed = [
            source.drop_new_vectors(one)
            for one in columns
            if source.read_migration_digest(one) in ours
        ]
        return any(removed)

    def _judge(
        self,
        plan: MigrationPlan,
        inputs: _Inputs,
        tell: Callable[[str], None],
    ) -> tuple[MigrationPlan, list[str]]:
        """Embed the sample and the queries, and compare the options.

        Returns:
            The plan with the verdict, and the lines of the verdict.
        """
        queries = inputs.queries
        if not self._sample.is_file():
            total = inputs.source.count()
            if not total:
                raise InvalidInputError(
                    f"{inputs.source.facts().name}: expected rows with a vector in "
                    f"{plan.vector_column!r}, found none, so there is nothing to migrate; embed "
                    "the items with the new model instead"
                )
            count = plan.sample_size or SAMPLE
            tell(f"sampling {min(count, total)} of {total} items")
            # `fit` judges by queries whose item is in the sample.
            wanted = [] if queries is None else queries.ids
            sampling = sample_source(inputs.source, count, wanted)
            _check_queries(plan, wanted, sampling.query_item_ids, tell)
            # A line of the sample's file cannot hold them; their vectors are written all the same.
            chosen = [item for item in sampling.ids if not has_line_break(item)]
            if left_out := len(sampling.ids) - len(chosen):
                tell(f"{left_out} items whose id has a line break are left out of the sample")
            text = encode_ids(chosen, plan.source_address)
            durable.write_file(self._sample, text.encode(), 0o600)
        counter = _Counter(tell, self._check_pause)
        only = read_ids(self._sample)
        key, condition = (None, None) if plan.items_path else (plan.key_column, plan.row_condition)
        items = read_items(
            plan.items_path or plan.source_address,
            column=plan.text_column or "text",
            key=key,
            vector=plan.vector_column,
            where=condition,
            only=only,
        )
        tell(f"embedding {len(items.ids)} items by {plan.new_model}")
        counter.begin("embedded", len(items.ids), unit="items")
        embed_into(self._new, items, inputs.new, progress=counter)
        by_old = by_new = None
        if queries is not None and inputs.old is not None:
            tell("embedding the queries by both models")
            by_old, by_new = (str(self._folder / f"queries-{side}") for side in ("old", "new"))
            # Some models encode queries in another way than items.
            new = open_embedder(plan.new_model, name=plan.new_model_name, queries=True)
            for folder, encoder in ((by_old, inputs.old), (by_new, new)):
                counter.begin("embedded", len(queries.ids), unit="queries")
                embed_into(Path(folder), queries, encoder, progress=counter)
        self._check_pause()
        tell(f"comparing the options on {len(only)} items; nothing is written yet")
        files = FitFiles(
            self._map, None, self._joining, self._page, query_adapter_file=self.adapter
        )
        verdict = fit_and_judge(
            plan.source_address,
            str(self._new),
            files,
            by_old,
            by_new,
            not plan.originals_gone,
            old_model_available=not plan.old_model_gone,
            key=plan.key_column,
            vector=plan.vector_column,
            where=plan.row_condition,
        )
        own_steps = set(map(str, verdict.json_answer.get("steps") or []))  # type: ignore[call-overload]
        lines = [line for line in verdict.terminal_lines if line not in own_steps]
        return replace(plan, state="decided", verdict=str(verdict.json_answer["way"])), lines

    def _check_pause(self) -> None:
        if self._pausing.exists():
            raise BusyError(
                f"{self._folder}: this migration is paused; run the same `nobackfill migrate` "
                "again to continue"
            )

    @contextmanager
    def _alone(self) -> Iterator[tuple[MigrationPlan, Reversible, Callable[[], None]]]:
        """Keep other processes out of the folder, and other migrations off the table.

        Yields the plan, its source and a function that raises where the lock of the table is lost.
        """
        self.plan()
        with self._locked():
            plan = self.plan()
            source = self._source(plan)
            with source.migration_lock() as check:
                yield plan, source, check

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with ExitStack() as locks:
            try:
                locks.enter_context(durable.lock_file(self._folder / "lock"))
            except BusyError as error:
                raise BusyError(
                    f"{self._folder}: another process works on this migration; stop it with "
                    "`nobackfill migrate pause`, or wait"
                ) from error
            yield

    def _save(self, plan: MigrationPlan) -> None:
        content = json.dumps(_PLAN.dump_python(plan, by_alias=True), indent=1)
        durable.write_file(self._file, content.encode(), 0o600)

    @property
    def adapter(self) -> Path:
        """Return the path of the query adapter in the working folder. The file exists once the plan
        is decided.
        """
        return self._folder / "adapter.npz"

    @property
    def _new(self) -> Path:
        return self._folder / "new"

    @property
    def _sample(self) -> Path:
        return self._folder / "sample.txt"

    @property
    def _joining(self) -> Path:
        return self._folder / "joining.npz"

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
    """Progress of one step: a line with the number, the rate and the time left, once a second.

    Args:
        tell: Called with each line.
        check: Called for each number; it may raise to end the step.
    """

    def __init__(self, tell: Callable[[str], None], check: Callable[[], None]) -> None:
        self.tell, self.check = tell, check
        self.begin("written", 0)

    def begin(
        self,
        verb: str,
        total: int,
        count_before: int = 0,
        *,
        unit: str = "rows",
        next_step: str = "0 s left",
    ) -> None:
        """Begin a step of `total` units, of which an earlier run has completed `count_before`.

        The line of the last unit ends with `next_step`.
        """
        self._verb, self._unit, self._total, self._next = verb, unit, total, next_step
        # Vectors of changed rows are written again, so more than the total may be written.
        self._before = min(count_before, total)
        self._start = self._last = time.monotonic()

    def __call__(self, count: int) -> None:
        """Show that this run has completed `count` units of the step."""
        now = time.monotonic()
        units = min(self._before + count, self._total)
        if now - self._last >= _EVERY or (units == self._total and now > self._last):
            self._last = now
            rate = count / max(1e-9, now - self._start)
            left = (self._total - units) / max(1e-9, rate)
            remains = f"{format_duration(left)} left" if left >= 2 else "less than 2 s left"
            self.tell(
                f"{units} of {self._total} {self._unit} {self._verb}, {rate:.0f} a second, "
                f"{remains if left else self._next}"
            )
        self.check()


def _describe_option(value: str | bool | None) -> str:
    """Describe the value of an option in a message."""
    if isinstance(value, str):
        return repr(value)
    return "given" if value else "not given"


def _complete(request: MigrationPlan, former: MigrationPlan | None) -> MigrationPlan:
    """Fill the parts that a request leaves as they are in the plan of an earlier run."""
    count, price, natives = request.sample_size, request.price_per_1000, request.natives_file
    if former is not None:
        count, natives = count or former.sample_size, natives or former.natives_file
        price = former.price_per_1000 if price is None else price
    return replace(request, sample_size=count or SAMPLE, price_per_1000=price, natives_file=natives)


def _check_queries(
    plan: MigrationPlan, ids: Sequence[str], keys: Collection[str], tell: Callable[[str], None]
) -> None:
    """Tell which queries have no item in the table; nothing without queries.

    Args:
        plan: The migration.
        ids: The items to find, one for each query.
        keys: The ids that are the key of a row with a vector.
        tell: Called with one line if some queries have no item.

    Raises:
        InvalidInputError: Fewer than 20 queries have one.
    """
    if plan.queries_file is None:
        return
    unknown = [name for name in ids if name not in keys]
    if len(ids) - len(unknown) < LEAST_QUERIES:
        found = f"found {len(ids) - len(unknown)} of {len(ids)}"
        raise InvalidInputError(
            f"{plan.queries_file}: expected at least {LEAST_QUERIES} queries whose `id` is a key "
            f"of a row with a vector, {found}; add queries, or leave out --queries and --old"
        )
    if unknown:
        tell(
            f"{len(unknown)} of {len(ids)} queries are left out, because the table has no vector "
            f"of their items: {join_few(map(repr, unknown))}"
        )


def _build_indexes(source: Reversible, target: Target) -> None:
    """Build the indexes of new vectors that searches use before a flip, or without one."""
    place = source.open_target(target)
    if isinstance(place, Flippable):
        with place.prepare_flip():
            pass


def _refuse_password(source: str) -> None:
    """Raise InvalidInputError for an address with a password: the folder would store it."""
    try:
        password = urlsplit(source).password
    except ValueError:
        password = None
    if password or "password=" in source:
        raise InvalidInputError(
            "SOURCE: expected no password in the address, because the working folder stores the "
            "address; put the password in ~/.pgpass or PGPASSWORD"
        )
