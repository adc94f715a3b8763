"""Every block of the documents runs in a test, or is no command; what is only told of a command is
one that there is."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from manual import commands
from tests.support.documents import ROOT, blocks, page
from tests.test_docs import NAMES

# Pages to the tests that run their blocks as they stand: in `sh`, `bash`, `python` and `grpcurl`.
RUN = {
    "README.md": ["tests/adopt/test_docs.py"],
    "docs/adopt.md": ["tests/adopt/test_docs.py"],
    "docs/architecture.md": ["tests/e2e/test_by_hand.py"],
    "docs/edge.md": ["tests/client/test_docs.py"],
    "docs/frameworks.md": ["tests/integrations/test_page.py"],
    "docs/immich.md": ["tests/adopt/test_immich_doc.py"],
    **{
        f"docs/operations/{name}.md": ["tests/server/test_operations_doc.py"]
        for name in ("secure", "call", "activate", "improve", "backup", "monitor")
    },
    "docs/quick-start.md": ["tests/e2e/test_quick_start.py"],
    "docs/releases.md": ["tests/release/test_docs.py", "tests/training/test_releases_page.py"],
    "docs/scale.md": ["tests/scale/test_scale_doc.py"],
    **{
        f"docs/tutorials/{name}.md": ["tests/manual/test_manual.py"]
        for name in ("researcher", "backend-engineer", "app-developer", "operator")
    },
}
# Of commands that need another machine, hours, or a person who looks; their words are checked.
UNRUN = ("shell",)
PLAIN = ("text",)
# Read by nobody who would type them.
RECORDS = ("CHANGELOG.md", "docs/adr/")


@pytest.mark.parametrize("name", NAMES)
def test_every_block_runs_or_is_no_command(name: str) -> None:
    kinds = {kind for kind, _ in re.findall(r"^```(\w*)\n(.*?)^```$", page(name), re.M | re.S)}
    assert "" not in kinds, f"{name}: a block without a language"
    if run := kinds - {*UNRUN, *PLAIN}:
        assert name in RUN, f"{name}: {run}"
        for test in RUN[name]:
            where = (ROOT / test).read_text("utf-8")
            folder, file = str(Path(name).parent), Path(name).stem
            assert file in where and (folder == "." or folder in where), f"{test} runs {name}"


def test_no_page_is_said_to_run_that_has_nothing_to_run() -> None:
    assert set(RUN) <= set(NAMES)
    for name in RUN:
        assert blocks(page(name), "sh", "bash", "python", "grpcurl"), name


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(RECORDS)])
def test_commands_that_are_named_have_these_words_and_options(name: str) -> None:
    for command, rest in told(page(name)):
        application = commands.application(command)
        options = of(application)
        words = [word for word in rest.split() if re.fullmatch(r"[a-z][a-z-]+", word)]
        while application.commands and words:
            # A global option's value may stand before it.
            found = [word for word in words if word in application.commands]
            if not found and "start" in application.commands:
                # `migrate SOURCE` is `migrate start SOURCE`.
                found, words = ["start"], ["start", *words]
            assert found or rest.split()[0].startswith("-"), f"{command} {rest}"
            if not found:
                break
            application = application.commands[found[0]]
            words = words[words.index(found[0]) + 1 :]
            options |= of(application)
        for option in re.findall(r"(?<!\S)(--[a-z][a-z0-9-]*)", rest):
            assert option in options | {"--help"}, f"{name}: {command} {rest}: no {option}"


def told(text: str) -> Iterator[tuple[str, str]]:
    """Commands of ours with what follows them, in blocks and in running text."""
    names = "|".join(map(re.escape, commands.COMMANDS))
    for _, block in blocks(text, "sh", "bash", "shell"):
        for line in block.replace("\\\n", " ").splitlines():
            plain = re.sub(r"(?:^|\s)#.*", "", line)
            yield from re.findall(rf"(?:^|[\s;(&|])({names})\s([^;&|)]*)", plain)
            for options in re.findall(r"DEMO_ARGS='?([^']*)", plain):
                yield "python -m demo.life", options
    yield from re.findall(rf"`({names})\s([^`]*)`", text)


def of(command: commands.Command) -> set[str]:
    return {option for p in command.params for option in (*p.opts, *p.secondary_opts)}


def test_the_check_of_words_can_fail() -> None:
    text = (
        "```sh\nX=1 gateway retire && gateway \\\n  serve --port 3 # gateway x\n```\n`nobackfill x`"
    )
    assert list(told(text)) == [
        ("gateway", "retire "), ("gateway", "   serve --port 3"), ("nobackfill", "x"),
    ]  # fmt: skip
    assert "--port" not in of(commands.application("gateway").commands["serve"])


def test_readme_answers_within_a_minute() -> None:
    """One screen before the first command, 120 lines at most, and no endless line."""
    lines = page("README.md").splitlines()
    assert len(lines) <= 120
    assert next(n for n, line in enumerate(lines) if line.startswith("```")) <= 30
    assert {"make demo", "make test"} <= {line.split("  ")[0] for line in lines}
    prose = [line for line in lines if not line.startswith(("|", "- "))]
    assert max(map(len, prose)) <= 170
