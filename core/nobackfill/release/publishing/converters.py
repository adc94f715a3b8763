"""Publishing a converter: its two files and the metadata that sign them, wholly or not at all."""

from collections.abc import Callable
from pathlib import Path

from tuf.api.metadata import TargetFile

from nobackfill import durable
from nobackfill.digests import sha256_bytes
from nobackfill.release.converter import (
    Converter,
    converter_manifest_path,
    converter_path,
    number_of_converter,
)
from nobackfill.release.manifest import PublishedFile
from nobackfill.release.publishing.keys import Keys
from nobackfill.release.publishing.metadata import next_metadata
from nobackfill.release.publishing.publish import (
    begin,
    clean,
    locked,
    put_files,
    put_metadata,
    signers_of,
)


def publish_converter(
    repo: Path,
    data: bytes,
    described: Callable[[int, PublishedFile], Converter],
    keys: Keys | None = None,
) -> Converter:
    """Sign and publish an ONNX map under the next number, in `repo` (made if missing).

    `described` makes the manifest from the number and the file. Raises BusyError, CannotWriteError,
    ConfigurationError (a key is missing). After a kill, running it again converges.
    """
    keys = keys or Keys.beside(repo)
    durable.make_dir(repo.absolute())
    with locked(repo):
        ledger = clean(repo)
        targets = dict(ledger.targets.targets) if ledger else {}
        number = 1 + max((number_of_converter(path) or 0 for path in targets), default=0)
        path = converter_path(number)
        file = PublishedFile(path=path, sha256=sha256_bytes(data), length=len(data))
        manifest = described(number, file)
        signers = signers_of(keys, begin(repo, keys))
        text = (manifest.model_dump_json(indent=1) + "\n").encode()
        files = {path: data, converter_manifest_path(number): text}
        for name, content in files.items():
            targets[name] = TargetFile.from_data(name, content, ["sha256"])
        put_files(repo, files)
        put_metadata(repo, next_metadata(ledger, targets, signers))
        return manifest
