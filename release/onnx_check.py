"""The ONNX gate: what a model file may be, decided before any session is made.

The rules (onnx_rules.py) run in a subprocess with limits on memory and time, as a crafted file may
crash or fill whatever parses it. `python -m release.onnx_check` is that subprocess.
"""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from release.errors import VerificationError, few
from release.manifest import Manifest, PublishedFile
from release.models import Files, locate
from release.tensors import Ends, Tensor, embedder_ends, side_encoder_ends, upgrade_ends

_MEMORY_BYTES = 3 * 2**30
_CPU_SECONDS = 60
_WALL_SECONDS = 120


@dataclass(frozen=True)
class OnnxFile:
    """A file to check, with the inputs and outputs that it must have."""

    path: Path
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


_REQUEST = TypeAdapter(dict[str, OnnxFile])


def check_onnx(files: Mapping[str, OnnxFile]) -> None:
    """Check files, by the names to be used in messages. Raises VerificationError."""
    if files:
        for name, refusal in refusals_in_subprocess(files).items():
            raise VerificationError(f"{name}: {refusal}; refused")


def refusals_in_subprocess(files: Mapping[str, OnnxFile]) -> dict[str, str]:
    """What `refusals` gives, behind limits. Raises VerificationError if the subprocess dies."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "release.onnx_check"],
            input=_REQUEST.dump_json(dict(files)).decode(),
            capture_output=True,
            text=True,
            timeout=_WALL_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise VerificationError(
            f"{few(files)}: checking took more than {_WALL_SECONDS} s, refused"
        ) from error
    if done.returncode != 0:
        raise VerificationError(
            f"{few(files)}: the checker died (exit status {done.returncode}) of too much "
            "memory, time or a damaged file, refused"
        )
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def refusals(files: Mapping[str, OnnxFile]) -> dict[str, str]:
    """Why files are refused, by name; files that pass are absent."""
    from release.onnx_rules import RefusedError, inspect

    found = {}
    for name, file in files.items():
        try:
            inspect(file.path, file.inputs, file.outputs)
        except RefusedError as error:
            found[name] = str(error)
        except (OSError, MemoryError, RecursionError) as error:
            found[name] = f"cannot be checked ({type(error).__name__}: {error})"
    return found


def check_release(files: Files, manifest: Manifest) -> None:
    """Check every ONNX file of a release that `files` holds. Raises VerificationError naming it."""
    wanted: list[tuple[PublishedFile, Ends]] = [(manifest.embedder.file, embedder_ends(manifest))]
    if (encoder := manifest.side_encoder) is not None:
        wanted.append((encoder.file, side_encoder_ends(manifest, encoder)))
    for upgrade in manifest.upgrades:
        ends = upgrade_ends(manifest, upgrade)
        wanted.append((upgrade.file, ends))
        if upgrade.int8_file is not None:
            wanted.append((upgrade.int8_file, ends))
    check_onnx(
        {
            file.path: OnnxFile(locate(files, file.path), *ends)
            for file, ends in wanted
            if _is_there(files, file)
        }
    )


def _is_there(files: Files, file: PublishedFile) -> bool:
    return not isinstance(files, Path) or (files / file.path).exists()


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_CPU_SECONDS, _CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Read files and their ends from stdin, write refusals by name to stdout, both JSON."""
    request = _REQUEST.validate_json(sys.stdin.read())
    _limit()
    print(json.dumps(refusals(request)))


if __name__ == "__main__":
    main()
