"""Choose the tests of `make quick`: those that start no process and no gateway and import no torch.

`-p tests.quick` switches this on. A file is skipped where importing it imports torch. A test is
left out where its code, a fixture of it, or what they call by name reaches what starts a process or
a gateway. The reading follows names through modules of this repository; it does not know what a
value is. A test that it misses fails when it runs: torch cannot be imported, no process and no
gateway starts. Mark such a test `slow`, as one that computes for seconds.
"""

import importlib
import os
import resource
import sys
import sysconfig
from collections.abc import Generator, Iterator
from functools import cache, cached_property, partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CellType, CodeType, FunctionType, MethodType, ModuleType

import pytest

from nobackfill.release import trial
from nobackfill.server.gateway import GatewayServer
from tests.support import trials

# Modules that start processes, and functions of os.
_STARTERS = ("subprocess", "multiprocessing", "concurrent.futures.process")
_FORKS = {"fork", "forkpty", "popen", "posix_spawn", "posix_spawnp", "system"}
_EVENTS = {"subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"}
# What is installed is not read. Releases are tried in the process of the test (tests/conftest.py).
_INSTALLED = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
_NOT_READ = (trial.explain_trial_failure_in_child, trials.forked)
_STARTER = object()
_EMPTY = CellType()


class NotQuickError(BaseException):
    """A test of `make quick` imports torch, or starts a process or a gateway.

    Not an Exception: the code under test must not handle it.
    """


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Choice(), "quick-choice")
    config.pluginmanager.register(_Guard(), "quick-guard")


class _Choice:
    """Leaves out what reaches a starter."""

    def __init__(self) -> None:
        self._reading = _Reading()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        heavy = {item for item in items if self._is_heavy(item)}
        config.hook.pytest_deselected(items=list(heavy))
        items[:] = [item for item in items if item not in heavy]

    def _is_heavy(self, item: pytest.Item) -> bool:
        assert isinstance(item, pytest.Function)
        fixtures = item._fixtureinfo.name2fixturedefs
        code: list[object] = [item.function]
        code += [each.func for name in item.fixturenames for each in fixtures.get(name, ())]
        if hasattr(item, "callspec"):
            code += item.callspec.params.values()
        return item.get_closest_marker("slow") is not None or self._reading.starts(code)

    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> None:
        """Skip a test that asks for such a fixture as it runs (getfixturevalue)."""
        if self._reading.starts([fixturedef.func]):
            fixturedef.func = _skip  # type: ignore[misc]  # pytest keeps what it raises


def _skip(**_: object) -> None:
    pytest.skip("a fixture starts a process")


class _Guard(MetaPathFinder):
    """Skips files that import torch; once tests run, fails those that do what is not quick."""

    def __init__(self) -> None:
        self._collects = True
        self._reasons: list[str] = []
        self._children = _children()
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name == "torch":
            if self._collects:
                pytest.skip("imports torch", allow_module_level=True)
            self._refuse("torch was imported")
        return None

    def _refuse(self, reason: str) -> None:
        self._reasons.append(reason)
        raise NotQuickError(reason)

    def pytest_collection_finish(self) -> None:
        self._collects = False
        GatewayServer.start = self._start  # type: ignore[assignment]
        sys.addaudithook(self._audit)

    def _start(self, _: object = None) -> None:
        self._refuse("a gateway was started")

    def _audit(self, event: str, _: object) -> None:
        if event in _EVENTS:
            self._refuse(f"a process was started ({event})")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Generator[None, None, None]:
        """Fail the test where its code handled NotQuickError, or a child came without an event."""
        yield
        reasons, self._reasons = self._reasons, []
        before, self._children = self._children, _children()
        if before != self._children:
            reasons.append("a process was started or ended")
        if reasons:
            raise NotQuickError(f"{reasons[0]}: mark the test `slow`")


def _children() -> tuple[object, bool]:
    """What the children that have ended used, and whether one is there."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return ended, False
    return ended, True


class _Reading:
    """Follows names from a test to what starts a process or a gateway, or imports torch."""

    def __init__(self) -> None:
        # What an object uses, by its identity. The object is held: no other gets its identity.
        self._used: dict[int, tuple[object, list[object]]] = {}

    def starts(self, code: list[object]) -> bool:
        """Whether anything of `code` reaches a starter."""
        todo = list(code)
        seen: set[int] = set()
        while todo:
            value = todo.pop()
            if value is _STARTER:
                return True
            if id(value) not in seen:
                seen.add(id(value))
                if id(value) not in self._used:
                    self._used[id(value)] = value, list(_uses(value))
                todo += self._used[id(value)][1]
        return False


def _uses(value: object) -> Iterator[object]:
    """The functions and classes that `value` names, and _STARTER for what is not quick."""
    match value:
        case _ if any(value is excluded for excluded in _NOT_READ):
            return
        case staticmethod() | classmethod() | MethodType():
            yield value.__func__
        case property():
            yield value.fget
        case partial() | cached_property():
            yield value.func
        case FunctionType() if "__wrapped__" in vars(value):
            yield vars(value)["__wrapped__"]
        case FunctionType() if _is_ours(value.__module__):
            yield from (cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY)
            names = set(_names(value.__code__))
            for name in names:
                if name in value.__globals__:
                    yield from _named(value.__globals__[name], names)
                elif not value.__module__.startswith("nobackfill."):
                    yield from _named(_imported(name), names)
        case type() if value is GatewayServer:
            yield _STARTER
        case type() if _is_ours(value.__module__):
            for part in value.__mro__:
                if _is_ours(part.__module__):
                    yield from vars(part).values()


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals, attributes and imported modules in `code`, and in what is defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _named(value: object, names: set[str]) -> Iterator[object]:
    """`value`; of a module, what `names` may mean in it."""
    if not isinstance(value, ModuleType):
        yield value
    elif value.__name__ in _STARTERS or (value is os and names & _FORKS):
        yield _STARTER
    elif _is_ours(value.__name__):
        for name in names & vars(value).keys():
            inner = vars(value)[name]
            if not isinstance(inner, ModuleType):
                yield inner
            elif inner.__name__ == f"{value.__name__}.{name}":
                yield from _named(inner, names)


def _imported(name: str) -> object:
    """The module that a function of a test imports as `name`; _STARTER if that imports torch."""
    if name != "torch" and name not in _STARTERS and "." not in name:
        return None
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
    except pytest.skip.Exception:
        return _STARTER


@cache
def _is_ours(module: str | None) -> bool:
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return file is not None and not file.startswith(_INSTALLED)
