"""What `edge-client search` does, once its line is understood."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nobackfill.client.output import Output

if TYPE_CHECKING:
    from nobackfill.client.search import DeviceAnswer
    from nobackfill.gallery.filters import Filter


@dataclass(frozen=True)
class SearchLine:
    """A line of the command: images, the id of an item or a text, one of the three; `where`: what
    a hit has to pass, `sheet`: the file of a contact sheet."""

    gallery: Path
    images: Sequence[Path] = ()
    item: str | None = None
    text: str | None = None
    k: int = 10
    where: "Filter | None" = None
    sheet: Path | None = None
    json: bool = False


def answer(asked: SearchLine) -> None:
    """Print what is found. Raises as Device.search."""
    from nobackfill.client.device import Device
    from nobackfill.client.search import Search

    with Device(asked.gallery) as device:
        view = Search(device, {} if asked.where is None else asked.where)
        if asked.item is not None:
            answers = [view.by_id(asked.item, asked.k)]
        elif asked.text is not None:
            answers = view.by_texts([asked.text], asked.k)
        else:
            answers = view.by_images(asked.images, asked.k)
        if asked.sheet is not None:
            from nobackfill.client.pictures import write_sheet

            write_sheet(device, answers, asked.sheet)
    one = answers[0].as_json() if len(answers) == 1 else None
    Output(asked.json).result(
        one or {"answers": [found.as_json() for found in answers]},
        *(line for found in answers for line in _table(found, len(answers) > 1)),
    )


def _table(answer: "DeviceAnswer", named: bool) -> list[str]:
    told = answer.as_json()
    lines = [f"{told['query']}:"] if named else []
    for hit in told["hits"]:
        score = "" if hit["score"] is None else f"{hit['score']:7.1%}"
        lines.append(f"{hit['id']}  {hit['distance']:8.4f}{score}  {hit['path']}")
    if answer.beyond_calibration:
        lines.append(
            "every hit lies beyond the distances that the release was calibrated on: the scores do "
            "not tell these hits apart"
        )
    return lines or ["nothing found: the gallery is empty, or no item passes --where"]
