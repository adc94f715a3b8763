"""Releases that are validly signed and wrong: what a publisher's stolen or careless hand makes.

Each begins as a good release with an upgrade from release 2 and is spoiled in one way; digests are
told anew where the way is not about them.
"""

import io
import json
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper
from tuf.api.metadata import TargetFile

from nobackfill.digests import sha256_bytes, side_space_id, space_id
from nobackfill.release import manifest
from nobackfill.release.paths import manifest_path
from nobackfill.release.publishing.metadata import (
    SigningKeys,
    make_next_metadata,
    require_signed_metadata,
)
from nobackfill.release.publishing.publish import load_signers, put_metadata
from tests.release.crafted import smallest_by_minus_one
from tests.support import blocks, graphs, releases


@dataclass
class Bad:
    """A release to be spoiled: its manifest as JSON, and its files' bytes by their paths."""

    number: int
    fields: dict[str, Any]
    files: dict[str, bytes]

    @property
    def upgrade(self) -> dict[str, Any]:
        return dict.__getitem__(self.fields, "upgrades")[0]  # type: ignore[no-any-return]

    def put(self, entry: dict[str, Any], data: bytes) -> None:
        """Give a file of the manifest other bytes."""
        self.files[entry["path"]] = data
        entry |= {"sha256": sha256_bytes(data), "length": len(data)}

    def model(self, entry: dict[str, Any], change: Callable[[onnx.ModelProto], None]) -> None:
        """Change a graph."""
        proto = onnx.ModelProto.FromString(self.files[entry["path"]])
        change(proto)
        self.put(entry, proto.SerializeToString())

    def renamed(self) -> None:
        """Tell the space anew, after the embedder changed."""
        told = self.fields["embedder"]
        shape = {key: told[key] for key in ("height", "width", "dim", "metric")}
        digest = told["file"]["sha256"]
        self.fields["space"] = space_id(digest, **shape, unit_norm=told["unit"])


Spoil = Callable[[Bad], None]


def _set(*keys: str | int, to: Any) -> Spoil:
    def spoil(bad: Bad) -> None:
        at: Any = bad.fields
        for key in keys[:-1]:
            at = at[key]
        at[keys[-1]] = to

    return spoil


def _dims(bad: Bad) -> None:
    bad.fields["embedder"]["dim"] = graphs.DIM // 2
    bad.renamed()


def _bomb(bad: Bad) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("image.npy", bytes(300 * 2**20))
    bad.put(bad.fields["probes"]["file"], buffer.getvalue())


def _lying_array(bad: Bad) -> None:
    header = io.BytesIO()
    shape = {"descr": "<f8", "fortran_order": False, "shape": (2**40,)}
    np.lib.format.write_array_header_1_0(header, shape)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("image.npy", header.getvalue())
    bad.put(bad.fields["probes"]["file"], buffer.getvalue())


def _deadly(bad: Bad) -> None:
    bad.model(bad.upgrade["file"], smallest_by_minus_one)


def _nan(bad: Bad) -> None:
    """0 / 0 for what comes, though the golden probes never see it: nobody recorded them so."""

    def change(model: onnx.ModelProto) -> None:
        move = next(t for t in model.graph.initializer if t.name == "move")
        move.CopyFrom(numpy_helper.from_array(np.full((64, 64), np.nan, np.float32), "move"))

    bad.model(bad.upgrade["file"], change)


def _memory(bad: Bad) -> None:
    """Sixteen gigabytes once two numbers are known that come with each input."""

    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(
            numpy_helper.from_array(np.array([1, 2**16], np.int64), "times")
        )
        model.graph.initializer.append(
            numpy_helper.from_array(np.array([2**16, 1], np.int64), "times_again")
        )
        last = next(n for n in model.graph.node if "upgraded" in n.output)
        last.output[0] = "before"
        model.graph.node.extend(
            [
                helper.make_node("ReduceSum", ["before"], ["sum"], keepdims=1),
                helper.make_node("Tile", ["sum", "times"], ["wide"]),
                helper.make_node("Tile", ["wide", "times_again"], ["huge"]),
                helper.make_node("ReduceMax", ["huge"], ["most"], keepdims=1),
                helper.make_node("Add", ["before", "most"], ["upgraded"]),
            ]
        )

    bad.model(bad.upgrade["file"], change)


# Rows that `fails_late` refuses.
LATE_ROWS = 12


def fails_late(bad: Bad) -> None:
    """Probes and full chunks pass; the upgrade of exactly LATE_ROWS rows reads beyond a table."""

    def change(model: onnx.ModelProto) -> None:
        for name, value in {"first": 0, "late": LATE_ROWS, "far": 5000}.items():
            number = numpy_helper.from_array(np.array([value], np.int64), name)
            model.graph.initializer.append(number)
        model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float32), "table"))
        last = next(n for n in model.graph.node if "upgraded" in n.output)
        last.output[0] = "before"
        model.graph.node.extend(
            [
                helper.make_node("Shape", ["before"], ["shape"]),
                helper.make_node("Gather", ["shape", "first"], ["rows"]),
                helper.make_node("Equal", ["rows", "late"], ["is_late"]),
                helper.make_node("Cast", ["is_late"], ["number"], to=onnx.TensorProto.INT64),
                helper.make_node("Mul", ["number", "far"], ["place"]),
                helper.make_node("Gather", ["table", "place"], ["nothing"]),
                helper.make_node("Add", ["before", "nothing"], ["upgraded"]),
            ]
        )

    bad.model(bad.upgrade["file"], change)


def _same_space(bad: Bad) -> None:
    """The embedder of release 2, byte for byte, and golden probes that say so."""
    bad.put(bad.fields["embedder"]["file"], bad.files["of release 2"])
    bad.renamed()
    entry = bad.fields["probes"]["file"]
    with np.load(io.BytesIO(bad.files[entry["path"]])) as probes:
        arrays = dict(probes)
    blocks_between = (2 - bad.number) * graphs.BLOCK
    arrays["embedding"] = np.roll(arrays["embedding"], blocks_between, axis=1)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    bad.put(entry, buffer.getvalue())


def _unsigned(bad: Bad) -> None:
    del bad.files[bad.upgrade["file"]["path"]]


def _other_digest(bad: Bad) -> None:
    bad.upgrade["file"]["sha256"] = "0" * 64


def _older_encoder(bad: Bad) -> None:
    """A side encoder that release 1 is said to have published, in the file of another."""
    bad.fields["side_encoder"]["origin_release"] = 1


def _no_such_side(bad: Bad) -> None:
    bad.upgrade["from_side_space"] = side_space_id("0" * 64)


def _embedding_of_images_too_large(bad: Bad) -> None:
    bad.fields["embedder"] |= {"height": 2048, "width": 2048}
    bad.renamed()


# How it is spoiled, and what is said of it.
BAD: dict[str, tuple[Spoil, str]] = {
    "its embedder is the trusted metadata": (
        _set("embedder", "file", "path", to="trusted.json"), "cannot be used"),
    "its upgrade is a lock": (
        _set("upgrades", 0, "file", "path", to="sync.lock"), "cannot be used"),
    "its probes lead out": (
        _set("probes", "file", "path", to="../../gallery.sqlite"), "cannot be used"),
    "a space id that is no digest": (_set("space", to="sp-" + "0" * 64), "the digest of"),
    "a space id that is a path": (_set("space", to="../sp"), "cannot be used"),
    "another format": (_set("format", to=99), "newer nobackfill"),
    "a format that is no number": (_set("format", to="\x1b[2J"), "cannot be used"),
    "another release's number": (_set("release", to=2), "cannot be used"),
    "an upgrade from itself": (_set("upgrades", 0, "from_release", to=3), "cannot be used"),
    "an upgrade from the future": (_set("upgrades", 0, "from_release", to=9), "cannot be used"),
    "a tolerance for anything": (_set("probes", "tolerance", to=1e9), "cannot be used"),
    "a tolerance of NaN": (_set("probes", "tolerance", to=float("nan")), "cannot be used"),
    "a calibration that falls": (
        _set("calibration", 0, "distances", to=[0.0, 2.0, 1.0]), "strictly increasing"),
    "a calibration of NaN": (
        _set("calibration", 0, "distances", to=[0.0, float("nan"), 4.0]), "finite"),
    "a route that keeps infinity": (_set("routes", 0, "kept", to=float("inf")), "finite"),
    "other dimensions": (_dims, "expected"),
    "a side space that no release has": (_no_such_side, "no route"),
    "a space before it that no release has": (
        _set("upgrades", 0, "from_space", to="sp-" + "1" * 64), "no route"),
    "an older side encoder that is none": (_older_encoder, "cannot be used"),
    "a file that nobody signed": (_unsigned, "does not sign"),
    "a file of another digest": (_other_digest, "another digest"),
    "the space of release 2": (_same_space, "the same space as release 2"),
    "images of another size": (_embedding_of_images_too_large, "expected [None, 2048, 2048, 3]"),
    "probes that unpack to gigabytes": (_bomb, "at most"),
    "probes that lie": (_lying_array, "golden probes"),
    "a graph that kills its loader": (_deadly, "not known to be above 0"),
    "an upgrade of NaN": (_nan, "expected finite values"),
    "an upgrade that fills the memory": (_memory, "elements for one item"),
}  # fmt: skip

# Those that it takes a child process to find out, some seconds each, are for `make faults`.
_LONG = {
    "other dimensions", "images of another size", "an upgrade of NaN",
    "probes that lie", "an upgrade that fills the memory",
}  # fmt: skip
# A gateway may make them active: no gallery can follow, each stays where it is and is named.
ROUTELESS = {name for name, (_, said) in BAD.items() if said == "no route"}
QUICK = [name for name in BAD if name not in _LONG]


def publish_bad(repo: Path, number: int, name: str, drafts: Path) -> None:
    """Sign and publish a spoiled release of BAD as `number` into `repo`, which holds release 2."""
    publish_spoiled(repo, number, BAD[name][0], drafts)


def publish_spoiled(repo: Path, number: int, spoil: Spoil, drafts: Path) -> None:
    """The same for any way to spoil it."""
    made = releases.draft(drafts, number, [blocks.manifest(repo, 2)])
    fields = json.loads(made.manifest.model_dump_json())
    files = {path: local.read_bytes() for path, local in made.local_files.items()}
    files["of release 2"] = (repo / manifest.embedder_path(2)).read_bytes()
    bad = Bad(number, fields, files)
    spoil(bad)
    del files["of release 2"]
    files |= {path: text.encode() for path, text in made.manifest.triton_configs().items()}
    files[manifest_path(number)] = json.dumps(fields).encode()
    sign(repo, files)


def sign(repo: Path, files: dict[str, bytes]) -> None:
    """Publish any files, as somebody who holds the keys can."""
    ledger = require_signed_metadata(repo)
    targets = dict(ledger.targets.targets)
    for path, data in files.items():
        (repo / path).parent.mkdir(parents=True, exist_ok=True)
        (repo / path).write_bytes(data)
        targets[path] = TargetFile.from_data(path, data, ["sha256"])
    put_metadata(
        repo,
        make_next_metadata(
            ledger, targets, load_signers(SigningKeys.of_publication(repo), ledger.root)
        ),
    )
