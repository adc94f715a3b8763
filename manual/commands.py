"""The reference of the commands: every option with its help, as --help has them."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import typer

# Commands to the module and name of their application.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "edge-client": ("nobackfill.client.cli.app", "app"),
    "gateway": ("nobackfill.server.cli.main", "app"),
    "publication": ("nobackfill.release.publishing.cli", "app"),
    "nobackfill": ("nobackfill.adopt.cli.app", "app"),
}


def page() -> str:
    """The page, in Markdown."""
    lines = ["# Commands", "", "Generated from the commands' own `--help`.", ""]
    for name, (module, app) in COMMANDS.items():
        command = typer.main.get_command(getattr(import_module(module), app))
        lines += [f"## {name}", "", *_told(name, command)]
        subcommands = getattr(command, "commands", {})
        for word, sub in sorted(subcommands.items()):
            lines += [f"### {name} {word}", "", *_told(f"{name} {word}", sub)]
    return "\n".join(lines)


def _told(name: str, command: Any) -> Iterator[str]:
    with command.context_class(command, info_name=name) as context:
        usage = " ".join(command.collect_usage_pieces(context))
        yield from ("```", f"{name} {usage}", "```", "")
        yield from (_cell(command.help or "").replace("\\|", "|"), "")
        records = [record for p in command.params if (record := _record(p, context))]
    if records:
        yield from ("| | |", "|---|---|")
        yield from (f"| `{option}` | {help_} |" for option, help_ in records)
        yield ""


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    found = parameter.get_help_record(context)
    if found is None:
        return (
            (parameter.human_readable_name, "") if parameter.param_type_name == "argument" else None
        )
    return found[0].replace("|", "\\|").replace("`", ""), _cell(found[1])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
