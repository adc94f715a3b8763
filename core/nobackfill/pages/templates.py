"""Templates: those of a room, and what all pages share (macros and the style sheet)."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

SHARED = Path(__file__).parent


def environment(*folders: Path) -> Environment:
    """Jinja over `folders` and the shared templates; all is escaped, and nothing is undefined."""
    return Environment(
        loader=FileSystemLoader([*folders, SHARED]), autoescape=True, undefined=StrictUndefined
    )
