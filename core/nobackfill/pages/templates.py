"""Load templates: those of a package, and the macros and the style sheet of all pages."""

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

SHARED_TEMPLATES = Path(__file__).parent


def template_environment(*folders: Path) -> Environment:
    """Return a Jinja environment over some folders and the shared templates.

    Values are escaped, and an undefined name raises jinja2.UndefinedError when a page is rendered.
    Templates are read at their first use, and again when their file changes.

    Args:
        folders: Folders of templates, which are searched in order, before the shared ones. A
            missing folder is ignored; a missing template raises jinja2.TemplateNotFound later.
    """
    return Environment(
        loader=FileSystemLoader([*folders, SHARED_TEMPLATES]),
        autoescape=True,
        undefined=StrictUndefined,
    )
