"""The plainest lines of `edge-client search`, read without typer: it takes longer to load than all
that such a line asks for. What is written otherwise, or wrongly, is left to typer."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nobackfill.client.cli.searching import SearchLine

GALLERY = "gallery.sqlite"
VARIABLE = "NOBACKFILL_GALLERY"

_NUMBER = re.compile(r"[1-9][0-9]{0,2}|1000")
_VALUES = {"--id": "item", "--text": "text", "-k": "k"}


def read(line: Sequence[str], environment: Mapping[str, str]) -> SearchLine | None:
    """What `[--gallery FILE] search [--id ID] [--text TEXT] [-k N] [--json] [IMAGE...]` asks for;
    None for every other line, and where a shell asks what could come next."""
    if "_EDGE_CLIENT_COMPLETE" in environment:
        return None
    words = list(line)
    gallery = environment.get(VARIABLE) or GALLERY
    if words[:1] == ["--gallery"] and len(words) > 1:
        gallery = words[1]
        del words[:2]
    if words[:1] != ["search"] or not gallery or gallery.startswith("-"):
        return None
    found: dict[str, Any] = {}
    images: list[Path] = []
    rest = iter(words[1:])
    for word in rest:
        if word == "--json":
            found["json"] = True
        elif word in _VALUES:
            found[_VALUES[word]] = next(rest, "")
        elif word and not word.startswith("-"):
            images.append(Path(word))
        else:
            return None
    return _asked(Path(gallery), images, found)


def _asked(gallery: Path, images: Sequence[Path], found: dict[str, Any]) -> SearchLine | None:
    values = [found[name] for name in _VALUES.values() if name in found]
    if not all(value and not value.startswith("-") for value in values):
        return None
    if bool(images) + ("item" in found) + ("text" in found) != 1:
        return None
    if "k" in found:
        if not _NUMBER.fullmatch(found["k"]):
            return None
        found["k"] = int(found["k"])
    return SearchLine(gallery, images, **found)
