"""What all web pages share: one style sheet, macros, who may ask, and how they are served.

Needs the extra `web`; the style sheet and the templates alone need jinja2.

>>> from nobackfill.pages import Guard, Site, new_token
>>> site = Site(folder, "Photos", [("/", "All of them")])
>>> app = Guard(site.app(), ["127.0.0.1:8642"], new_token())
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.pages.guard import Guard as Guard, new_token as new_token
    from nobackfill.pages.listener import Listener as Listener
    from nobackfill.pages.site import Site as Site
    from nobackfill.pages.templates import environment as environment
else:
    __getattr__ = offer(
        __name__,
        {
            "guard": "Guard new_token",
            "listener": "Listener",
            "site": "Site",
            "templates": "environment",
        },
    )
