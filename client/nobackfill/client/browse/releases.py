"""Pages of the release that answers: what a sync would do, doing it, and the way back."""

import asyncio
from collections.abc import AsyncIterator

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from nobackfill.client import ballast
from nobackfill.client.browse.task import Desk
from nobackfill.client.device import Device
from nobackfill.client.output import Output, size
from nobackfill.client.photos.backfill import embed_again, re_embed
from nobackfill.client.status import status
from nobackfill.client.sync.rollback import roll_back
from nobackfill.client.sync.sentence import sentence
from nobackfill.client.sync.sync import Wishes, sync
from nobackfill.errors import InvalidInputError, NobackfillError, NotFoundError
from nobackfill.pages import Site
from nobackfill.pages.listener import ending
from nobackfill.pages.site import fields

# Between two reports of a task.
_REPORT_SECONDS = 0.25
# Items that are embedded again at one wish.
_MOST_AGAIN = 10_000


class Releases:
    """What is shown of releases, and what changes which one answers."""

    def __init__(self, device: Device, desk: Desk, site: Site) -> None:
        self._device = device
        self._desk = desk
        self._site = site

    def release(self, request: Request) -> Response:
        """The release, its spaces, and what may be done."""
        found = status(self._device)
        return self._site.show(
            request, "release.html.j2", found=found, size=size, task=self._desk.task,
            manifest=self._device.active(),
        )  # fmt: skip

    def preview(self, request: Request) -> Response:
        """What a sync would do; asks the source, and changes nothing."""
        try:
            report = sync(self._device, Wishes(dry_run=True), Output(bars=False))
        except NobackfillError as error:
            # Being without a network is no mistake of whoever looks.
            return self._site.show(request, "notice.html.j2", sentence=str(error))
        return self._site.show(request, "preview.html.j2", report=report, sentence=sentence(report))

    def sync(self, request: Request, body: bytes) -> Response:
        """Begin to follow the newest release."""
        wishes = Wishes(retry=fields(body).get("retry") == "yes")

        def work(output: Output) -> str:
            report = sync(self._device, wishes, output)
            ballast.keep(self._device.path)
            for note in report.notes:
                output.note(note)
            return sentence(report)

        self._desk.start("Sync", work)
        return self._site.go(request, "/release")

    def rollback(self, request: Request, body: bytes) -> Response:
        """Return to the release before."""
        roll_back(self._device)
        return self._site.go(request, "/release")

    def again(self, request: Request, body: bytes) -> Response:
        """Embed one item again from its file, or so many of the least certain."""
        asked = fields(body)
        if "label" in asked:
            label = _number(asked["label"], 2**63 - 1)
            (item,) = self._device.store.items([label])
            if item is None:
                raise NotFoundError("There is no such picture in the gallery (any more).")
            chosen = [item]

            def one(output: Output) -> str:
                done = embed_again(self._device, self._device.active(), chosen, output)
                return "Embedded again from its file." if done else (
                    "Not embedded again: its file is gone or was changed, and the vault has none."
                )  # fmt: skip

            self._desk.start("Embedding again", one)
            return self._site.go(request, f"/item/{label}")
        count = _number(asked.get("count", ""), _MOST_AGAIN)

        def work(output: Output) -> str:
            done = re_embed(self._device, self._device.active(), count, output)
            return f"{done} of the least certain embedded again from their files."

        self._desk.start("Embedding again", work)
        return self._site.go(request, "/uncertain")

    async def progress(self, request: Request) -> Response:
        """The task's progress as server-sent events, until it has ended."""
        return EventSourceResponse(self._reports(request))

    async def _reports(self, request: Request) -> AsyncIterator[ServerSentEvent]:
        shown = ""
        while (task := self._desk.task) is not None and not ending(request):
            running = task.running
            text = self._site.text(request, "progress.html.j2", task=task)
            if text != shown:
                shown = text
                yield ServerSentEvent(text, event="progress")
            if not running:
                break
            await asyncio.sleep(_REPORT_SECONDS)
        yield ServerSentEvent("", event="end")


def _number(text: str, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and 1 <= int(text) <= most):
        raise InvalidInputError(f"expected a whole number from 1 to {most}, got {text[:20]!r}")
    return int(text)
