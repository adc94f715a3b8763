"""Manifests from their files; what is wrong with one that cannot be used, in one line."""

from pydantic import ValidationError

from nobackfill.errors import UnfitError, few
from nobackfill.release.manifest import Manifest
from nobackfill.release.paths import NEWEST_FORMAT


def parse_manifest(text: str | bytes, release: int | None = None) -> Manifest:
    """Read a manifest, of `release` where one is expected.

    Raises UnfitError in one line: it needs a newer version of this program (another format, or keys
    that this one does not know), or it breaks the rules.
    """
    name = "this release" if release is None else f"release {release}"
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise UnfitError(_refusal(name, error)) from error
    if release not in (None, manifest.release):
        raise UnfitError(f"{name}: its manifest says it is release {manifest.release}")
    return manifest


def _refusal(name: str, error: ValidationError) -> str:
    problems = error.errors(include_url=False, include_context=False)
    keys = {".".join(map(str, problem["loc"])): problem for problem in problems}
    kind = keys.get("format")
    if kind is not None and isinstance(kind["input"], int) and kind["input"] > NEWEST_FORMAT:
        return (
            f"{name} needs a newer nobackfill: its manifest is of format {kind['input']}, not "
            f"{NEWEST_FORMAT}"
        )
    if all(problem["type"] == "extra_forbidden" for problem in problems):
        return f"{name} needs a newer nobackfill: its manifest has the new keys {few(keys)}"
    wrong = (f"{key}: {problem['msg']}".removeprefix(": ") for key, problem in keys.items())
    return f"{name}: its manifest cannot be used ({few(wrong)})"
