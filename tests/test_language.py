"""Count wording that readers stumble over: names that are no nouns or verbs, and odd openings.

Two kinds of words are counted in each root of the repository:

- **names**: public modules, classes, functions, parameters and fields that are a participle or an
  adverb, such as `found`, `asked` or `beside`. Use a noun or a verb of the field
  (docs/glossary.md): `hits`, `query`, `second_table`.
- **openings**: sentences of docstrings, comments, errors, help, `.proto` comments and documents
  that begin with a word of `OPENING`. Begin with the subject: "Callers that send promptly are
  unaffected", not "Who sends at once is never in the way". Questions and headings are free.

`ALLOWED` holds what each root had when it was last counted. A test fails where a root has more, and
lists every place in it. After you remove some, lower the number: run

    .venv/bin/python -m tests.test_language

and copy its table here. Never raise a number.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
OPENING = re.compile(
    r"(?:Who|Whom|Whose|Whoever|What|Whatever|Those|Of|That which)\b(?!.*\?\Z)", re.DOTALL
)
PARTICIPLES = """
allowed answered asked born brought called chosen closed come counted covered dead done drawn due
emptied expected filled found given gone got heard held joined kept known learned learnt left lost
made meant measured met named needed opened owed passed promised refused said seen sent shown
skipped spoken stored taken told tried unused used wanted went worn written wrote
asking bringing coming doing finding getting giving going hearing holding keeping knowing lasting
leaving making meaning meeting putting saying seeing sending showing taking telling wanting writing
"""
VERBS_IN_THE_THIRD_PERSON = """
asks brings comes finds gets gives goes hears holds keeps knows leaves makes means needs puts says
sees sends shows tells wants
"""
ADVERBS = """
above afar after afterwards again alone already also apart aside before behind below beside between
early else elsewhere ever fresh hence here late lately likewise meanwhile near never next_to now
once otherwise rest so still then there thereby thus together twice whole wholly within without yet
"""
FORBIDDEN = frozenset(f"{PARTICIPLES} {VERBS_IN_THE_THIRD_PERSON} {ADVERBS}".split())
SENTENCE_END = re.compile(r"(?<=[.!?:])\s+(?=[A-Z`\"'(])|\n\s*\n|\n\s*[-*|>]\s|\n\s*\d+\. ")

# Root: (names, openings).
ALLOWED = {
    "core": (0, 0),
    "serving": (0, 0),
    "adopt": (0, 0),
    "server": (0, 0),
    "client": (0, 0),
    "plugins": (0, 0),
    "training": (0, 0),
    "research": (0, 0),
    "protos": (0, 0),
    "docs": (0, 0),
    "README.md": (0, 0),
}


@pytest.mark.parametrize("root", ALLOWED)
def test_old_wording_only_shrinks(root: str) -> None:
    for kind, places, allowed in zip(
        ("names", "openings"), _places(root), ALLOWED[root], strict=True
    ):
        assert len(places) <= allowed, "\n".join(
            [f"{len(places)} {kind} in {root}, {allowed} allowed; reword what you added:", *places]
        )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Who sends at once is unaffected.", 1),
        ("Callers send. What they send is kept.", 1),
        ("Of three vectors,\none is stale: Those are older.", 2),
        ("What is a release?", 0),
        ("Officially, callers send what they have.", 0),
    ],
)
def test_openings_are_counted(text: str, count: int) -> None:
    assert len(list(filter(OPENING.match, _sentences(text)))) == count


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("class Found: ...", "1: class Found"),
        ("def asked(): ...", "1: function asked"),
        ("def search(*,\n beside=1): ...", "2: parameter beside"),
        ("found: int", "1: field found"),
        ("def search(table): found = 1", None),
    ],
)
def test_names_are_counted(code: str, name: str | None) -> None:
    assert next(filter(None, map(_forbidden_name, _walk(ast.parse(code)))), None) == name


@cache
def _places(root: str) -> tuple[list[str], list[str]]:
    """Return the places of forbidden names and of sentences with a forbidden opening."""
    names, openings = list[str](), list[str]()
    for file in _files(root):
        place = file.relative_to(REPOSITORY)
        source = file.read_text()
        if file.suffix == ".py":
            if file.stem in FORBIDDEN:
                names.append(f"{place}: module {file.stem}")
            texts = []
            for node in _walk(ast.parse(source)):
                if name := _forbidden_name(node):
                    names.append(f"{place}:{name}")
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts.append((node.lineno, node.value))
            texts += _comments(source, "#")
        elif file.suffix == ".proto":
            texts = list(_comments(source, "//"))
        else:
            texts = list(_paragraphs(source))
        openings += [
            f"{place}:{line}: {sentence[:80]}"
            for line, text in texts
            for sentence in _sentences(text)
            if OPENING.match(sentence)
        ]
    return names, openings


def _files(root: str) -> list[Path]:
    path = REPOSITORY / root
    if path.is_file():
        return [path]
    suffix = {"protos": ".proto", "docs": ".md"}.get(root, ".py")
    return [file for file in path.rglob(f"*{suffix}") if "superseded" not in file.parts]


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node of a tree, in half the time of `ast.walk`."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        for value in vars(node).values():
            if isinstance(value, list):
                nodes.extend(child for child in value if isinstance(child, ast.AST))
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                nodes.append(value)


def _forbidden_name(node: ast.AST) -> str | None:
    """Return line, kind and name where a node defines a public name that is forbidden."""
    match node:
        case ast.ClassDef(name=name):
            kind = "class"
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            kind = "function"
        case ast.arg(arg=name):
            kind = "parameter"
        case ast.AnnAssign(target=ast.Name(id=name)):
            kind = "field"
        case _:
            return None
    return f"{node.lineno}: {kind} {name}" if name.lower() in FORBIDDEN else None


def _comments(source: str, mark: str) -> Iterator[tuple[int, str]]:
    """Yield each comment: adjacent lines that begin with `mark`, or the end of a line of code."""
    block: list[str] = []
    for number, line in enumerate([*source.splitlines(), ""], 1):
        code, separator, comment = line.partition(mark)
        if separator and not code.strip():
            block.append(comment.strip())
            continue
        if block:
            yield number - len(block), "\n".join(block)
            block = []
        if separator and code.endswith("  "):
            yield number, comment.strip()


def _paragraphs(document: str) -> Iterator[tuple[int, str]]:
    """Yield the first line and the text of each paragraph, without code, headings and tables."""
    prose = re.sub(
        r"^```.*?^```|^#[^\n]*|^\|[^\n]*",
        lambda block: "\n" * block[0].count("\n"),
        document,
        flags=re.DOTALL | re.MULTILINE,
    )
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", prose):
        yield line, paragraph
        line += paragraph.count("\n")


def _sentences(text: str) -> list[str]:
    return [
        " ".join(sentence.split()).lstrip(" `*_>-(\"'") for sentence in SENTENCE_END.split(text)
    ]


def main() -> None:
    """Print the table of today's counts."""
    for root in ALLOWED:
        names, openings = map(len, _places(root))
        sys.stdout.write(f'    "{root}": ({names}, {openings}),\n')


if __name__ == "__main__":
    main()
