"""`edge-client browse` as a command: what it prints, and what others on the machine can see."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.client.test_cli import COMMAND
from tests.support.edge import Setting
from tests.support.waiting import wait_until

# A browser that keeps how it was called, and what it was shown.
BROWSER = """\
#!{python}
import os, pathlib, sys, urllib.parse
page = pathlib.Path(urllib.parse.unquote(urllib.parse.urlsplit(sys.argv[1]).path))
text = f"{{sys.argv[1]}}\\n{{os.stat(page).st_mode & 0o777:o}}\\n{{page.read_text()}}"
pathlib.Path({kept!r} + ".part").write_text(text)
os.replace({kept!r} + ".part", {kept!r})
"""


def test_the_secret_is_on_no_command_line(setting: Setting, tmp_path: Path) -> None:
    kept, browser = tmp_path / "kept", tmp_path / "browser"
    browser.write_text(BROWSER.format(python=sys.executable, kept=str(kept)))
    browser.chmod(0o755)
    around = {**os.environ, "BROWSER": f"{browser} %s", "NOBACKFILL_GALLERY": str(setting.gallery)}
    with subprocess.Popen(
        [COMMAND, "browse", "--open"], stdout=subprocess.PIPE, env=around, text=True
    ) as browsing:
        assert browsing.stdout is not None
        address = browsing.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{20,}/", address)
        assert browsing.stdout.readline().startswith("Anybody who knows")
        wait_until(kept.exists, "the browser is called")
        called, mode, page = kept.read_text().split("\n", 2)
        secret = address.split("/")[3]
        assert called.startswith("file://") and secret not in called
        assert mode == "600" and address in page
        browsing.send_signal(signal.SIGINT)
        browsing.wait(60)
    assert not list(setting.gallery.parent.glob("*.html"))
