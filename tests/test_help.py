"""Help tells of each option the default that the code applies, and tells it in one place."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from manual.commands import COMMANDS, Command, Parameter, application, below
from nobackfill.release.publishing.declaration import Declaration
from nobackfill.release.publishing.metadata import SigningKeys
from nobackfill.server.settings import Settings
from nobackfill.server.triton.process import default_folder
from nobackfill.training.protocols.persons import OperatingPoints
from nobackfill.v1.release_pb2 import ActivateReleaseRequest
from tests.inventory import proto_defaults

pytestmark = pytest.mark.slow
_TOLD = re.compile(r" ?\[(?:env var: \w+; )?(?:default: ([^\];]*)(?:; |\]))?[^\]]*\]?\Z")
# A help text that tells a default itself, where nothing compares it.
_ELSEWHERE = re.compile(r"\bdefault|\(\d[^)]*\)|\b0 means\b", re.IGNORECASE)
# Options that nothing stands in for: without one, that is not done, or not narrowed.
OPTIONAL = """
--adapter --also --beside --browse --by --card --console --data --embedder --eval --eval-texts
--every --from --gallery --id --images --independent --item-folder --item-host --joining --json
--map --model-name --once --onnx --page --picture --protocol --queries --queries-new
--queries-old --query-encoder --ray --recipient --release --report --root --set --settings
--column --items --natives --new-name --old --old-name --price-per-1000 --vectors --with
--sheet --shortest --side-encoder --source --steps --text --text-encoder --texts --tls-cert
--tls-client-ca --tls-key --tokens-file --upgrade --vectors-of --weights --where
"""


def everything() -> Iterator[tuple[str, Command]]:
    """Every command by what is typed, with the groups and the commands in them."""

    for name in COMMANDS:
        command = application(name)
        yield name, command
        yield from ((f"{name} {words}", one) for words, one in below(command))


def parameters() -> dict[str, Parameter]:
    """Everything that help shows of a value, by command and name."""
    return {
        f"{name} {one.name}": one
        for name, command in everything()
        for one in command.params
        if one.record is not None and one.name != "--help"
    }


def told(parameter: Parameter) -> tuple[str, str | None]:
    """The help text, and the default beside it."""
    assert parameter.record is not None
    text = " ".join(parameter.record[1].split())
    found = _TOLD.search(text)
    if found is None:
        return text, None
    default = found[1]
    return text[: found.start()], default and re.sub(r"^\((.*)\)\Z", r"\1", default)


def applied() -> Mapping[str, object]:
    """Defaults that stand elsewhere in the code than in the option."""
    proto, keys = proto_defaults(), SigningKeys.of_publication(Path("/MODEL_REPO"))
    points, declared = OperatingPoints(), Declaration()
    activation = {
        "spare_cores": proto["ActivateReleaseRequest.spare_cores"],
        "old_space_seconds": ActivateReleaseRequest().old_space_seconds,
    }
    assert proto["EstimateUpgradeRequest.spare_cores"] == activation["spare_cores"]
    healing = {
        "hits": proto["ItemSource.hits"],
        "seconds": float(proto["ItemSource.patience"]),
        "bytes_a_query": proto["ItemSource.bytes_a_query"],
        "concurrency": proto["ItemSource.concurrency"],
        "a_day": proto["ItemSource.items_a_day"],
    }
    canary = {name: proto[f"Canary.{name}"] for name in ("most_errors", "largest_p99_ratio")}
    found: dict[str, object] = {
        "gateway activate --settings": in_file(activation),
        "gateway estimate --settings": in_file(activation),
        "gateway canary start --settings": in_file(activation | canary),
        "gateway update-gallery --settings": in_file(healing),
        "gateway serve --triton-venv": default_folder().name,
        "gateway install-triton [DIR]": default_folder().name,
        "python training/evaluate.py --far": points.far,
        "python training/evaluate.py --fpir": points.fpir,
        "nobackfill embed --fit": declared.fit,
        "nobackfill embed --interpolation": declared.interpolation,
        "nobackfill embed --mean": declared.mean,
        "nobackfill embed --std": declared.std,
    }
    shown = parameters()
    for command in ("serve", "upgrade"):
        for name, field in Settings.model_fields.items():
            option = f"gateway {command} --{name.replace('_', '-')}"
            if option in shown and field.default not in (None, ()):
                found[option] = field.default
    for option, parameter in shown.items():
        for role in ("root", "targets"):
            if parameter.name == f"--{role}-key" and option.startswith("publication"):
                path = keys.key_path("root" if role == "root" else "targets")
                found[option] = path.relative_to("/")
    return found


def in_file(numbers: Mapping[str, object]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in numbers.items())


def written(value: object) -> str:
    return plain(" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value))


def plain(text: str) -> str:
    """The text, whatever zeros and commas its numbers are written with."""
    words = text.replace(",", "").split(" ")
    return " ".join(str(float(w)) if re.fullmatch(r"\d[\d.e-]*", w) else w for w in words)


def test_help_tells_the_default_that_the_code_applies() -> None:
    shown, elsewhere = parameters(), applied()
    assert set(elsewhere) <= set(shown)
    wrong = []
    for option, parameter in shown.items():
        value = elsewhere.get(option, parameter.default)
        if value is None or value is False or value == "" or parameter.required:
            continue
        _, default = told(parameter)
        expected = parameter.opts[0] if value is True else written(value)
        # A sentence may say what comes before it, or where a folder lies.
        got = re.split(r"^.* else | next to ", default or "")
        if value is True:
            got, expected = [one.lstrip("-") for one in got], expected.lstrip("-")
        if expected not in map(plain, got):
            wrong.append(f"{option}: help tells {default}, the code applies {expected}")
    assert not wrong, "\n".join(wrong)


def test_an_option_tells_what_stands_in_for_it() -> None:
    """Every option with a value, but those of OPTIONAL and those that must be given."""
    optional = set(OPTIONAL.split())
    assert optional <= {parameter.name for parameter in parameters().values()}
    silent = [
        option
        for option, parameter in parameters().items()
        if not parameter.required
        and parameter.name.startswith("-")
        and not re.fullmatch(r"(-\S+[, /]*)+", parameter.record[0] if parameter.record else "")
        and not told(parameter)[1]
        and parameter.name not in optional
    ]
    assert not silent


def test_a_default_is_told_beside_the_text_alone() -> None:
    """Where this test compares it, and not in the words of the text."""
    found = {option: told(parameter)[0] for option, parameter in parameters().items()}
    assert not {option: text for option, text in found.items() if _ELSEWHERE.search(text)}


def test_help_of_the_gateway_shows_all_that_it_says() -> None:
    """Its help is rendered by rich, which takes words in brackets for markup."""
    found = {k: told(one)[0] for k, one in parameters().items() if k.startswith("gateway")}
    assert found
    assert not {option: text for option, text in found.items() if "[" in text}


def test_each_command_begins_with_its_user_story() -> None:
    """One sentence of at most 25 words, which begins with a verb, and a paragraph of its own."""
    for name, command in everything():
        story = " ".join(command.help.split("\n\n")[0].split())
        if name.startswith("edge-client"):
            # argparse makes one paragraph of all.
            story = re.split(r"(?<=\.) (?=[A-Z])", story)[0]
        assert re.fullmatch(r"[A-Z][a-z-]+,? [^.!?]+(\.\w[^.!?]*)*\.", story), f"{name}: {story}"
        assert not re.match(r"The |An? |\w+s ", story), f"{name}: {story}"
        assert len(story.split()) <= 25, f"{name}: {story}"
