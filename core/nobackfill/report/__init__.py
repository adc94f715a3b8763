"""Write one HTML page that shows the effect of an upgrade on a gallery; needs the extra `training`.

`python -m nobackfill.report` writes it to a file.

>>> from nobackfill.report import upgrade_page
>>> page = upgrade_page(model_repo, release=2, image_folder=None)
>>> page.startswith("<!doctype html>")
True
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.report.page import upgrade_page as upgrade_page
else:
    __getattr__ = export_lazily(__name__)
