"""The reference of the commands: every option with its help, as --help has them."""

import argparse
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import typer

# Columns of what is shown as in a terminal.
_WIDTH = 90
# What is typed -> module and name of its application, or of the function that is one.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "edge-client": ("nobackfill.client.cli.main", "edge_client"),
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


@dataclass(frozen=True)
class Parameter:
    """An option, or an argument, of a command: its names, and what its help says."""

    name: str
    opts: Sequence[str]
    secondary_opts: Sequence[str]
    default: Any
    choices: Sequence[str] | None
    required: bool
    repeated: bool
    # As --help shows it, and its help; None where help hides it.
    record: tuple[str, str] | None


@dataclass(frozen=True)
class Command:
    """A command, or a group of commands, as its --help describes it."""

    usage: str
    help: str
    epilog: str
    params: Sequence[Parameter]
    commands: Mapping[str, "Command"] = field(default_factory=dict)


def page() -> str:
    """The page, in Markdown."""
    lines = ["# Commands", "", "Generated from the commands' own `--help`.", ""]
    for name in COMMANDS:
        command = application(name)
        lines += [f"## {name}", "", *_described(command)]
        for word, sub in below(command):
            lines += [f"### {name} {word}", "", *_described(sub)]
    return "\n".join(lines)


def below(command: Command) -> Iterator[tuple[str, Command]]:
    """List the commands of a group, those of groups in it too, with the words that call each."""
    for word, sub in sorted(command.commands.items()):
        yield word, sub
        yield from ((f"{word} {words}", one) for words, one in below(sub))


def application(name: str) -> Command:
    """The command, or group of commands, behind one of COMMANDS."""
    module, attribute = COMMANDS[name]
    found = getattr(import_module(module), attribute)
    if attribute == "edge_client":
        return _of_argparse(found(), name)
    if not isinstance(found, typer.Typer):
        app = typer.Typer(add_completion=False)
        app.command()(found)
        found = app
    return _of_click(typer.main.get_command(found), name)


def _of_click(command: Any, name: str) -> Command:
    with command.context_class(command, info_name=name) as context:
        return Command(
            usage=f"{name} {' '.join(command.collect_usage_pieces(context))}",
            help=command.help or "",
            epilog=command.epilog or "",
            params=[_click_parameter(one, context) for one in command.params],
            commands={
                word: _of_click(one, f"{name} {word}")
                for word, one in getattr(command, "commands", {}).items()
            },
        )


def _click_parameter(parameter: Any, context: Any) -> Parameter:
    option = parameter.param_type_name == "option"
    record = parameter.get_help_record(context)
    if record is None and not option:
        record = (parameter.human_readable_name, getattr(parameter, "help", None) or "")
    return Parameter(
        name=max(parameter.opts, key=len) if option else parameter.human_readable_name,
        opts=parameter.opts,
        secondary_opts=parameter.secondary_opts,
        default=parameter.default,
        choices=getattr(parameter.type, "choices", None),
        required=parameter.required,
        repeated=parameter.multiple or parameter.nargs != 1,
        record=record,
    )


def _of_argparse(parser: Any, name: str) -> Command:
    """Describe a parser of nobackfill.client.cli.options."""
    # argparse has no public list of what a parser takes.
    actions = [one for one in parser._actions if one.dest != "help"]
    groups = [one for one in actions if one.nargs == argparse.PARSER]
    return Command(
        usage=parser.format_usage().removeprefix("usage: ").strip(),
        help=parser.description,
        epilog=parser.closing,
        params=[_argparse_parameter(one) for one in actions if one not in groups],
        commands={
            word: _of_argparse(one, f"{name} {word}")
            for group in groups
            for word, one in group.choices.items()
        },
    )


def _argparse_parameter(action: argparse.Action) -> Parameter:
    opts, metavar = list(action.option_strings), str(action.metavar)
    takes_none = action.nargs == 0
    shown = ", ".join(opts) + ("" if takes_none else f" {metavar}") if opts else metavar
    text = (action.help or "").replace("%(default)s", str(action.default))
    return Parameter(
        name=(opts[0] if opts else metavar),
        opts=opts or [action.dest],
        secondary_opts=[],
        default=None if action.default is argparse.SUPPRESS else action.default,
        choices=list(action.choices) if action.choices else None,
        required=action.required and (bool(opts) or action.nargs == "+"),
        repeated=action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction),
        record=None if action.help is argparse.SUPPRESS else (shown, text),
    )


def _described(command: Command) -> Iterator[str]:
    yield from ("```text", command.usage, "```", "")
    yield from (_cell(command.help).replace("\\|", "|"), "")
    records = [one.record for one in command.params if one.record is not None]
    if records:
        yield from ("| | |", "|---|---|")
        for option, text in records:
            shown = option.replace("|", "\\|").replace("`", "")
            yield f"| `{shown}` | {_cell(text)} |"
        yield ""
    if command.epilog:
        lines = (textwrap.fill(line, _WIDTH) for line in command.epilog.strip().splitlines())
        yield from ("```text", *lines, "```", "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[")
