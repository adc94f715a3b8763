"""The reference of the commands: every option with its help, as --help has them."""

import textwrap
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

# Columns of what is shown as in a terminal.
_WIDTH = 90
# What is typed -> module and name of its application, or of the function that is one.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "edge-client": ("nobackfill.client.cli.app", "app"),
    "gateway": ("nobackfill.server.cli.main", "app"),
    "publication": ("nobackfill.release.publishing.cli", "app"),
    "nobackfill": ("nobackfill.adopt.cli", "app"),
    "python training/train.py": ("nobackfill.training.cli.train", "app"),
    "python training/export.py": ("nobackfill.training.cli.export", "app"),
    "python training/evaluate.py": ("nobackfill.training.cli.evaluate", "app"),
    "python training/compare.py": ("nobackfill.research.compare", "app"),
    "python -m nobackfill.training.data.cifar100": ("nobackfill.training.data.cifar100", "app"),
    "python -m nobackfill.report": ("nobackfill.report.__main__", "command"),
    "python -m demo.life": ("demo.life", "command"),
    "python -m bench.run": ("bench.run", "main"),
}


def page() -> str:
    """The page, in Markdown."""
    lines = ["# Commands", "", "Generated from the commands' own `--help`.", ""]
    for name in COMMANDS:
        command = application(name)
        lines += [f"## {name}", "", *_described(name, command)]
        for word, sub in sorted(getattr(command, "commands", {}).items()):
            lines += [f"### {name} {word}", "", *_described(f"{name} {word}", sub)]
    return "\n".join(lines)


def application(name: str) -> Any:
    """The click command, or group of commands, behind one of COMMANDS."""
    module, attribute = COMMANDS[name]
    found = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command()(found)
        found = app
    return typer.main.get_command(found)


def _described(name: str, command: Any) -> Iterator[str]:
    with command.context_class(command, info_name=name) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("```text", f"{name} {usage}", "```", "")
        yield from (_cell(command.help or "").replace("\\|", "|"), "")
        records = [record for p in command.params if (record := _record(p, context))]
    if records:
        yield from ("| | |", "|---|---|")
        yield from (f"| `{option}` | {help_} |" for option, help_ in records)
        yield ""
    if command.epilog:
        lines = (textwrap.fill(line, _WIDTH) for line in command.epilog.strip().splitlines())
        yield from ("```text", *lines, "```", "")


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    found = parameter.get_help_record(context)
    if found is None:
        if parameter.param_type_name != "argument":
            return None
        found = (parameter.human_readable_name, getattr(parameter, "help", None) or "")
    return found[0].replace("|", "\\|").replace("`", ""), _cell(found[1])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
