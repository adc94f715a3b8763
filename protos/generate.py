"""Generate Python code from the .proto files; `--check` reports whether committed code is fresh.

Run as `python protos/generate.py [--check]` (`make proto`, `make lint`).
"""

import argparse
import importlib.resources
import os
import sys
import tempfile
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(into: Path) -> None:
    """Write message classes, their type stubs and service code for every .proto under ROOT.

    Args:
        into: the folder to write to.

    Raises:
        SystemExit: protoc refuses a file; it has printed the reason.
    """
    sources = sorted(str(path) for path in ROOT.rglob("*.proto"))
    wellknown = str(importlib.resources.files("grpc_tools") / "_proto")
    kinds = ("python_out", "pyi_out", "grpc_python_out", "mypy_grpc_out")
    outputs = [f"--{kind}={into}" for kind in kinds]
    # The plugin behind mypy_grpc_out (typed stubs) is a script in the folder of this interpreter.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{wellknown}", *outputs, *sources]) != 0:
        raise SystemExit(1)


def stale(fresh: Path) -> list[str]:
    """List generated files under ROOT that differ from `fresh`, are missing, or are superfluous."""
    committed = {p.relative_to(ROOT) for s in SUFFIXES for p in ROOT.rglob(f"*{s}")}
    wanted = {p.relative_to(fresh) for s in SUFFIXES for p in fresh.rglob(f"*{s}")}
    same = {n for n in committed & wanted if (ROOT / n).read_bytes() == (fresh / n).read_bytes()}
    return sorted(str(name) for name in (committed | wanted) - same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if stale")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        if names := stale(Path(folder)):
            sys.exit(f"generated code is not fresh: {', '.join(names)}; run `make proto`")


if __name__ == "__main__":
    main()
