"""The pages of one gallery: items, searches, and the active release, behind the guard."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from urllib.parse import urlencode

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from nobackfill.client import conditions
from nobackfill.client.device import Device
from nobackfill.client.gallery_file import create_reserve
from nobackfill.client.output import Advance, Output, format_bytes
from nobackfill.client.photos import ReleaseEncoder, local_image
from nobackfill.client.pictures import Thumbnails
from nobackfill.client.search import DeviceAnswer, Search
from nobackfill.client.status import status
from nobackfill.client.sync import (
    SyncOptions,
    describe_report,
    re_embed,
    re_embed_items,
    roll_back,
    sync,
)
from nobackfill.errors import (
    BusyError,
    IncompatibleSpaceError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    UnusableOutputError,
)
from nobackfill.gallery.filter_engine import passing_labels
from nobackfill.gallery.filters import All
from nobackfill.gallery.listing import ListingPosition, read_items_page
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem
from nobackfill.images import LARGEST_IMAGE_BYTES
from nobackfill.plugins.web.guard import Guard, new_token
from nobackfill.plugins.web.listener import Listener, is_ending
from nobackfill.plugins.web.site import Site, parse_form
from nobackfill.release.models import no_vector_error

# The most notes of one task.
_MOST_NOTES = 100


@dataclass
class PageTask:
    """The progress of a task; its thread writes it, and pages read it.

    Attributes:
        title: the name of the task.
        step_start: when the present step began, in seconds of the monotonic clock.
        step: the name of the present step; empty before the first one.
        step_count: how much of the step has ended.
        step_total: the size of the step; 0 if it is not known.
        notes: remarks, at most 100.
        outcome: empty while the task runs; then one sentence, an error if `has_failed`.
        has_failed: whether the task ended with an error.
    """

    title: str
    step_start: float = field(default_factory=time.monotonic)
    step: str = ""
    step_count: int = 0
    step_total: int = 0
    notes: list[str] = field(default_factory=list)
    outcome: str = ""
    has_failed: bool = False

    @property
    def running(self) -> bool:
        """Return whether the task has not ended."""
        return not self.outcome

    @property
    def remaining_s(self) -> float | None:
        """Return the seconds that the present step may still take at its rate so far.

        None if its size is not known, nothing of it is counted yet, or it has ended. A task that
        failed within a step still has a value: look at `running` first.
        """
        if not 0 < self.step_count < self.step_total:
            return None
        return (
            (time.monotonic() - self.step_start)
            / self.step_count
            * (self.step_total - self.step_count)
        )


@dataclass(frozen=True)
class _TaskOutput(Output):
    """Collects what a command would print, for a page."""

    task: PageTask = field(default_factory=lambda: PageTask(""))

    def print_note(self, line: str) -> None:
        if len(self.task.notes) < _MOST_NOTES:
            self.task.notes.append(line)

    @contextmanager
    def progress(self, what: str) -> Iterator[Advance]:
        task = self.task
        task.step, task.step_count, task.step_total, task.step_start = what, 0, 0, time.monotonic()

        def advance(count: int, total: int) -> None:
            task.step_count, task.step_total = min(count, total), total

        yield advance


class TaskRunner:
    """Runs tasks on threads, one at a time, and remembers the last one.

    Attributes:
        task: the task that runs or ran last; None before the first one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.task: PageTask | None = None

    def start(self, title: str, work: Callable[[Output], str]) -> PageTask:
        """Start a task on a thread, and return at once.

        Any thread may call it. The end of the process ends the task, too.

        Args:
            title: the name of the task.
            work: writes progress and notes to its argument, and returns the outcome as one
                sentence; an empty one becomes "done". An error of nobackfill becomes the outcome of
                a task that failed.

        Returns:
            The task, which its thread updates. Another error of `work` becomes a fixed sentence,
            and is printed on stderr.

        Raises:
            BusyError: another task runs.
            RuntimeError: the system can start no thread; later calls then raise BusyError.
        """
        with self._lock:
            if self.task is not None and self.task.running:
                raise BusyError(
                    f"the task {self.task.title!r} is running, and only one task runs at a time; "
                    "wait until it has ended"
                )
            task = self.task = PageTask(title)
        threading.Thread(target=_run_task, args=(task, work), name="task", daemon=True).start()
        return task


def _run_task(task: PageTask, work: Callable[[Output], str]) -> None:
    try:
        task.outcome = work(_TaskOutput(show_progress=False, task=task)) or "done"
    except NobackfillError as error:
        task.has_failed = True
        task.outcome = str(error)
    except BaseException:
        task.has_failed = True
        task.outcome = "An unexpected error occurred: see the terminal of edge-client browse."
        raise


# How old a search's snapshot may be while a sync writes, when every chunk is a commit.
_OLDEST_SECONDS = 2.0


@dataclass(frozen=True)
class _CachedSearch:
    search: Search
    commits: int
    read_at: float


class SearchSnapshots:
    """Cached searches in the active and in the previous space; threads may share it.

    A search is read again after any commit to the gallery; during a sync, every two seconds. Every
    method may raise VerificationError (a file is damaged) and BusyError (another process holds the
    gallery).
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._cached: dict[str, _CachedSearch] = {}
        self._encoders: dict[str, ReleaseEncoder] = {}
        self._lock = threading.Lock()

    def active(self) -> Search:
        """Return a search of all items in the active space, at most two seconds old.

        The vectors stay in memory, one copy for each space. A call that reads them again blocks the
        others. A search that was returned before stays as it was.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        while True:
            try:
                return self._cached_search(self._device.store.active().spec)
            except IncompatibleSpaceError:
                # A sync flipped and dropped the space between the two reads.
                continue

    def previous(self) -> Search | None:
        """Return a search in the space before the last upgrade.

        The vectors stay in memory, as those of the active space.

        Returns:
            None if no rollback is possible, or the space was dropped since.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        previous = self._device.previous_space()
        try:
            return None if previous is None else self._cached_search(previous.spec)
        except IncompatibleSpaceError:
            return None

    def by_image(
        self, search: Search, image: bytes, k: int, where: All | None = None
    ) -> DeviceAnswer:
        """Return the items nearest to an image, which is not stored.

        The model of the space is opened once, and other threads that search wait for that. Hits are
        nearest first.

        Args:
            search: the search of one space.
            image: encoded bytes.
            k: the number of hits, 1 to 1000.
            where: a filter that every hit must pass; None: all items.

        Raises:
            InvalidInputError: the bytes are no image, the image has no vector, or `k` is out of
                range.
            NoEncoderError: the release embeds no images.
            VerificationError: a model file or the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            IncompatibleSpaceError: the space was dropped since.
            NotFoundError: the release of the space is not installed, or the gallery was closed.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            TypeError: `where` is no filter, or a value in it is None or a list.
        """
        encoder = self._release_encoder(search.spec)
        try:
            vector = encoder.embed([encoder.pixels(image)])[0]
        except UnusableOutputError as error:
            raise InvalidInputError(f"the picture: {no_vector_error(encoder.manifest)}") from error
        selection = search if where is None else search.with_filter(where)
        return selection.by_embedding({search.spec.space: vector.tolist()}, k)

    def _cached_search(self, spec: SpaceSpec) -> Search:
        with self._lock:
            commits, staging = self._commits_and_staging()
            cached = self._cached.get(spec.space)
            if cached is not None:
                young = time.monotonic() - cached.read_at < _OLDEST_SECONDS
                if cached.commits == commits or (staging and young):
                    return cached.search
            search = Search(self._device, {}, spec)
            spaces = {space.spec.space for space in self._device.store.spaces()}
            self._cached = {name: one for name, one in self._cached.items() if name in spaces}
            self._cached[spec.space] = _CachedSearch(search, commits, time.monotonic())
            return search

    def _commits_and_staging(self) -> tuple[int, bool]:
        """Return the number of commits of all processes, and whether a sync writes vectors now."""
        with self._device.store.read_snapshot() as connection:
            commits = connection.execute("SELECT count FROM commits").fetchone()[0]
            staging = connection.execute("SELECT 1 FROM spaces WHERE state = 'staging'").fetchone()
        return int(commits), staging is not None

    def _release_encoder(self, spec: SpaceSpec) -> ReleaseEncoder:
        with self._lock:
            if spec.space not in self._encoders:
                manifest = self._device.manifest(spec.release)
                self._encoders = {
                    name: one for name, one in self._encoders.items() if name in self._cached
                }
                self._encoders[spec.space] = ReleaseEncoder(
                    self._device.models, manifest, with_side=False
                )
            return self._encoders[spec.space]


# Items per page of the grid, hits of a search, and hits compared before and after an upgrade.
GRID, HITS, COMPARED = 60, 24, 10

_MISSING = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 240 240"><rect width="240" height="240" '
    'fill="#e3e7eb"/><g fill="#46525e" font-family="sans-serif" font-size="22" '
    'text-anchor="middle"><text x="120" y="114">original</text><text x="120" y="142">missing'
    "</text></g></svg>"
)
_ORIGINS = {
    "native": "embedded from its file",
    "upgraded": "migrated without its image",
    "re-embedded": "re-embedded from its file",
    "direct": "as an older release stored it: this release searches it directly",
}


@dataclass(frozen=True)
class HitTile:
    """A thumbnail of a hit, and the text below it.

    Attributes:
        label: the item's label.
        caption: the text below the thumbnail.
        score: the probability of a match, 0 to 1; None without a calibration.
        change_kind: compared with another ranking, "new" or "gone"; else empty.
        change_text: "new", "gone", or the change of position; empty without a change.
    """

    label: int
    caption: str
    score: float | None = None
    change_kind: str = ""
    change_text: str = ""


class ItemPages:
    """Pages of items: the grid, one item, and its pictures."""

    def __init__(
        self, device: Device, view: SearchSnapshots, thumbnails: Thumbnails, site: Site
    ) -> None:
        self._device = device
        self._view = view
        self._thumbnails = thumbnails
        self._site = site

    def photos(self, request: Request) -> Response:
        """Show a grid of 60 items, in the order in which they were added.

        The address may have conditions (`where`) and the place after the last page (`after`).
        Each `where` is one condition, and all must hold. A request of htmx (header HX-Request) gets
        only the tiles.

        Raises:
            InvalidInputError: a condition or the place is not valid.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            IncompatibleSpaceError: a sync dropped the space during the request.
            NotFoundError: the gallery was closed.
        """
        return self._render_grid(request, least_certain=False)

    def uncertain(self, request: Request) -> Response:
        """Show a grid of 60 migrated items, the least certain first.

        The address may have conditions (`where`) and the place after the last page (`after`).
        Each `where` is one condition, and all must hold. A request of htmx (header HX-Request) gets
        only the tiles.

        Raises:
            InvalidInputError: a condition or the place is not valid.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            IncompatibleSpaceError: a sync dropped the space during the request.
            NotFoundError: the gallery was closed.
        """
        return self._render_grid(request, least_certain=True)

    def _render_grid(self, request: Request, *, least_certain: bool) -> Response:
        store = self._device.store
        texts = request.query_params.getlist("where")
        passing = passing_labels(store, conditions.parse_conditions(texts)) if texts else None
        token = request.query_params.get("after")
        place = (
            None
            if token is None
            else ListingPosition.from_token(token, least_certain=least_certain)
        )
        items, last = read_items_page(
            store, store.active().spec.space, GRID,
            start_after=place, matches=passing, least_certain=least_certain,
        )  # fmt: skip
        pairs = [("where", one) for one in texts]
        more = None if last is None else urlencode([*pairs, ("after", last.to_token())])
        filters = [(one, urlencode([pair for pair in pairs if pair[1] != one])) for one in texts]
        return self._site.respond_with_page(
            request,
            "tiles.html.j2" if "hx-request" in request.headers else "photos.html.j2",
            items=[item for item, _ in items],
            name=item_name,
            more=more,
            filters=filters,
            least_certain=least_certain,
            total=store.count() if passing is None else len(passing),
            release=store.active().spec.release,
        )

    def item(self, request: Request) -> Response:
        """Show one item, similar items, and the origin of its vector.

        Args:
            request: its path has the item's label.

        Raises:
            NotFoundError: there is no such item, it has no vector in the active space, the release
                of a space is not installed, or the gallery was closed.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            IncompatibleSpaceError: a sync dropped the space during the request.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        item = self._requested_item(request)
        active, previous = self._view.active(), self._view.previous()
        answer = active.by_id(item.id, HITS)
        old_answer = None
        if previous is not None:
            # The old model may have been unable to embed an item that was added after the upgrade.
            with suppress(NotFoundError):
                old_answer = previous.by_id(item.id, COMPARED)
        migration = self._device.state("carried", {}).get(str(active.spec.release), {})
        return self._site.respond_with_page(
            request,
            "item.html.j2",
            item=item,
            name=item_name(item),
            missing=local_image(item) is None,
            hits=self.tiles(answer),
            changed=None if old_answer is None else self.compare(old_answer, answer),
            release=active.spec.release,
            before=None if previous is None else previous.spec.release,
            how=_ORIGINS.get(item.origin or "", "not searchable in this release's space"),
            migrated=_format_time(migration.get("at"))
            if item.origin in ("upgraded", "direct")
            else None,
            routes=migration.get("routes", []),
        )

    def thumbnail(self, request: Request) -> Response:
        """Send an item's thumbnail, or a placeholder if its original is missing.

        A new thumbnail is cached. The browser may store it for a day.

        Args:
            request: its path has the item's label.

        Raises:
            NotFoundError: there is no such item, or the gallery was closed.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        return self._jpeg_response(self._thumbnails.thumbnail(self._requested_item(request)))

    def picture(self, request: Request) -> Response:
        """Send a copy of an item's image, at most 1280 pixels long, without the camera's metadata.

        A placeholder is sent if the original is missing. The browser may store it for a day.

        Args:
            request: its path has the item's label.

        Raises:
            NotFoundError: there is no such item, or the gallery was closed.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        return self._jpeg_response(self._thumbnails.large_picture(self._requested_item(request)))

    def tiles(self, answer: DeviceAnswer) -> list[HitTile]:
        """Convert the hits of an answer to tiles; items that were deleted since are left out.

        Returns:
            The tiles, nearest first. An item that was put again since is shown as it is now.

        Raises:
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        items = [(hit, self._device.store.get(hit.id)) for hit in answer.hits]
        return [
            HitTile(item.label, item_name(item), hit.score)
            for hit, item in items
            if item is not None
        ]

    def compare(
        self, old_answer: DeviceAnswer, new_answer: DeviceAnswer
    ) -> tuple[list[HitTile], list[HitTile]]:
        """Compare the first ten hits of two rankings of one query.

        Items that were deleted since are left out, and the next hits move up.

        Args:
            old_answer: the answer in the previous space.
            new_answer: the answer in the active space.

        Returns:
            The tiles of the old answer, with those that the new one lacks marked as gone; and the
            tiles of the new answer, with new ones and changes of position noted.

        Raises:
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        old, new = (self.tiles(answer)[:COMPARED] for answer in (old_answer, new_answer))
        position = {tile.label: at for at, tile in enumerate(old)}
        new_labels = {tile.label for tile in new}
        old_tiles = [
            tile
            if tile.label in new_labels
            else HitTile(tile.label, tile.caption, tile.score, "gone", "gone")
            for tile in old
        ]
        new_tiles = []
        for at, tile in enumerate(new):
            old_position = position.get(tile.label)
            note = (
                "new"
                if old_position is None
                else f"{old_position + 1} → {at + 1}"
                if old_position != at
                else ""
            )
            kind = "new" if old_position is None else ""
            new_tiles.append(HitTile(tile.label, tile.caption, tile.score, kind, note))
        return old_tiles, new_tiles

    def _requested_item(self, request: Request) -> StoredItem:
        label = request.path_params["label"]
        # SQLite has no larger labels.
        if label < 2**63:
            for _ in range(2):
                try:
                    space = self._device.store.active().spec.space
                    (item,) = self._device.store.items([label], space)
                except IncompatibleSpaceError:
                    # A sync flipped between the two reads.
                    continue
                if item is not None:
                    return item
        raise NotFoundError(
            "This picture is not in the gallery, or no longer: go back to the list of photos."
        )

    def _jpeg_response(self, content: bytes | None) -> Response:
        if content is None:
            return Response(_MISSING, media_type="image/svg+xml")
        headers = {"Cache-Control": "private, max-age=86400"}
        return Response(content, media_type="image/jpeg", headers=headers)


def item_name(item: StoredItem) -> str:
    """Return the name of an item for people: its file's name, else its id.

    Returns:
        The metadata `name`, if there is one that is not empty, as text.
    """
    return str(item.metadata.get("name") or item.id)


def read_where(request: Request) -> All:
    """Parse the conditions `where` in a page's address; without any, every item passes.

    Raises:
        InvalidInputError: a condition is not valid; see
            nobackfill.client.conditions.parse_conditions.
    """
    return conditions.parse_conditions(request.query_params.getlist("where"))


def _format_time(text: object) -> str | None:
    try:
        return f"{datetime.fromisoformat(str(text)):%d %B %Y, %H:%M} UTC"
    except ValueError:
        return None


class SearchPages:
    """Searches by uploaded pictures, which are not stored."""

    def __init__(self, view: SearchSnapshots, items: ItemPages, site: Site) -> None:
        self._view = view
        self._items = items
        self._site = site

    def by_picture(self, request: Request, picture: bytes) -> Response:
        """Show the items nearest to a picture, and how the last upgrade changed them.

        Args:
            request: its address may have conditions (`where`).
            picture: the encoded image; it is not stored.

        Raises:
            InvalidInputError: the bytes are no image, the image has no vector, or a condition is
                not valid.
            NoEncoderError: the active or the previous release embeds no images.
            NotFoundError: the release of a space is not installed, or the gallery was closed.
            IncompatibleSpaceError: a sync dropped the space during the request.
            VerificationError: a file of the gallery is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        where = read_where(request)
        active, previous = self._view.active(), self._view.previous()
        answer = self._view.by_image(active, picture, HITS, where)
        changed = None
        if previous is not None:
            old_answer = self._view.by_image(previous, picture, COMPARED, where)
            changed = self._items.compare(old_answer, answer)
        return self._site.respond_with_page(
            request,
            "hits_of_picture.html.j2",
            hits=self._items.tiles(answer),
            beyond=answer.beyond_calibration,
            changed=changed,
            release=active.spec.release,
            before=None if previous is None else previous.spec.release,
        )


# Seconds between two reports of a task.
_REPORT_SECONDS = 0.25
# The most items that one request re-embeds.
_MOST_ITEMS = 10_000


class ReleasePages:
    """Pages of releases, and the actions that change the active one."""

    def __init__(self, device: Device, desk: TaskRunner, site: Site) -> None:
        self._device = device
        self._desk = desk
        self._site = site

    def release(self, request: Request) -> Response:
        """Show the active release, the gallery's spaces, and possible actions.

        Raises:
            NotFoundError: the release is not installed, or the gallery was closed.
            VerificationError: a file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            IncompatibleSpaceError: a sync dropped a space during the request.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
            OSError: a file of the gallery disappears during the request, or cannot be read.
        """
        return self._site.respond_with_page(
            request, "release.html.j2", gallery=status(self._device), size=format_bytes,
            task=self._desk.task, manifest=self._device.active_manifest(),
        )  # fmt: skip

    def preview(self, request: Request) -> Response:
        """Show what a sync would do, or the error that it would meet.

        Calls the source, and changes nothing but the downloaded metadata. It blocks until the
        source answers. An error becomes a notice with the status 200. While a sync runs, the notice
        says so.

        Raises:
            OSError: a file of the models folder cannot be read.
        """
        try:
            report = sync(self._device, SyncOptions(dry_run=True), Output(show_progress=False))
        except NobackfillError as error:
            # Without a network this is no error of the person who looks.
            return self._site.respond_with_page(request, "notice.html.j2", sentence=str(error))
        return self._site.respond_with_page(
            request, "preview.html.j2", report=report, sentence=describe_report(report)
        )

    def sync(self, request: Request, body: bytes) -> Response:
        """Start a sync on a thread; the form's `retry` = "yes" also tries releases held back.

        Redirects at once. Errors of the sync become the outcome of the task.

        Raises:
            BusyError: another task runs.
            InvalidInputError: the body is no form; an empty one is.
        """
        options = SyncOptions(retry=parse_form(body).get("retry") == "yes")

        def work(output: Output) -> str:
            report = sync(self._device, options, output)
            create_reserve(self._device.path)
            for note in report.notes:
                output.print_note(note)
            return describe_report(report)

        self._desk.start("Sync", work)
        return self._site.redirect(request, "/release")

    def rollback(self, request: Request, body: bytes) -> Response:
        """Return to the previous release, and hold the present one back.

        Args:
            body: ignored.

        Raises:
            NotFoundError: there is no previous release, or the gallery was closed.
            PreconditionError: some items have no vector in the previous space.
            BusyError: a sync is writing vectors, or another process holds the gallery file.
            VerificationError: a file of the gallery is damaged.
            CannotWriteError: the disk is full or read-only.
        """
        roll_back(self._device)
        return self._site.redirect(request, "/release")

    def re_embed(self, request: Request, body: bytes) -> Response:
        """Start to re-embed one item from its file, or a number of the least certain items.

        The form has either `label`, of an item, or `count`, from 1 to 10,000. Redirects at once.
        Errors of the work become the outcome of the task. `label` wins if both are there. An item
        whose file is gone or changed keeps its vector, unless the vault has a copy.

        Raises:
            NotFoundError: there is no such item, or the gallery was closed.
            InvalidInputError: `label` or `count` is no such number, or the body is no form.
            BusyError: another task runs, or another process holds the gallery file.
            VerificationError: a file of the gallery is damaged.
            CannotWriteError: the gallery file cannot be opened, or the disk fails.
        """
        form = parse_form(body)
        if "label" in form:
            label = _parse_number("the picture's label", form["label"], 2**63 - 1)
            (item,) = self._device.store.items([label])
            if item is None:
                raise NotFoundError(
                    "This picture is not in the gallery, or no longer: go back to the list of "
                    "photos."
                )
            items = [item]

            def one(output: Output) -> str:
                count = re_embed_items(self._device, self._device.active_manifest(), items, output)
                return "Re-embedded from its file." if count else (
                    "Not re-embedded: its file is gone or was changed, and the vault has no copy."
                )  # fmt: skip

            self._desk.start("Re-embedding", one)
            return self._site.redirect(request, f"/item/{label}")
        most = _parse_number("the number of pictures", form.get("count", ""), _MOST_ITEMS)

        def work(output: Output) -> str:
            count = re_embed(self._device, self._device.active_manifest(), most, output)
            return f"{count} of the least certain items were re-embedded from their files."

        self._desk.start("Re-embedding", work)
        return self._site.redirect(request, "/uncertain")

    async def progress(self, request: Request) -> Response:
        """Send the progress of the last task as server-sent events, until it has ended.

        A report comes at most four times a second, and only if it has changed; then one event
        `end`. Without a task, or when the server stops, only `end` is sent.
        """
        return EventSourceResponse(self._progress_events(request))

    async def _progress_events(self, request: Request) -> AsyncIterator[ServerSentEvent]:
        last_text = ""
        while (task := self._desk.task) is not None and not is_ending(request):
            running = task.running
            text = self._site.render(request, "progress.html.j2", task=task)
            if text != last_text:
                last_text = text
                yield ServerSentEvent(text, event="progress")
            if not running:
                break
            await asyncio.sleep(_REPORT_SECONDS)
        yield ServerSentEvent("", event="end")


def _parse_number(what: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most):
        raise InvalidInputError(
            f"{what}: expected a whole number from 1 to {most}, got {text[:20]!r}; enter another "
            "number"
        )
    return int(text)


_LINKS = (("/", "Photos"), ("/uncertain", "Least certain"), ("/release", "Release"))


@contextmanager
def serve_pages(device: Device, port: int) -> Iterator[str]:
    """Serve the pages of an open gallery to browsers on this machine, until the block ends.

    Anybody who knows the address sees the gallery and can change it. The pages are served on a
    thread, which the end of the block stops. The gallery stays open. Each call has another secret,
    so earlier addresses end with their block. A task that runs then goes on.

    Args:
        device: the gallery.
        port: the port on 127.0.0.1; 0: any free one.

    Yields:
        The address of the pages, which contains a secret.

    Raises:
        ConfigurationError: the port cannot be used, or is in use.
    """
    token = new_token()
    with Listener("127.0.0.1", port) as listener:
        guard = make_site(device, listener.hosts, token)
        listener.serve(guard, guard.has_secret)
        yield f"{listener.address}/{token}/"


def make_site(device: Device, hosts: Iterable[str], token: str) -> Guard:
    """Make the guarded site of an open gallery.

    Args:
        device: the gallery.
        hosts: HOST:PORT as browsers may write it.
        token: the secret that the path of every request must begin with.

    Returns:
        The application, which serves nothing until a server runs it. It keeps vectors in memory
        once a page needs them.
    """
    site = Site(Path(__file__).parent / "templates", device.path.stem, _LINKS)
    view, desk = SearchSnapshots(device), TaskRunner()
    items = ItemPages(device, view, Thumbnails(device.path), site)
    searches = SearchPages(view, items, site)
    releases = ReleasePages(device, desk, site)
    site.get("/", items.photos)
    site.get("/uncertain", items.uncertain)
    site.get("/item/{label:int}", items.item)
    site.get("/thumb/{label:int}", items.thumbnail)
    site.get("/picture/{label:int}", items.picture)
    site.post("/search", searches.by_picture, LARGEST_IMAGE_BYTES)
    site.get("/release", releases.release)
    site.get("/release/preview", releases.preview)
    site.post("/sync", releases.sync)
    site.post("/rollback", releases.rollback)
    site.post("/again", releases.re_embed)
    site.stream("/progress", releases.progress)
    return Guard(site.app(), hosts, token)
