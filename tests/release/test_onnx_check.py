"""The ONNX check: crafted and mutated files are refused, before any session, at bounded cost."""

import random
import resource
from pathlib import Path

import pytest

from nobackfill.digests import sha256_bytes
from nobackfill.errors import VerificationError
from nobackfill.release import manifest
from nobackfill.release.manifest import Tensor
from nobackfill.release.models import open_embedder
from nobackfill.release.onnx_rules import OnnxRuleError, check_onnx_file
from nobackfill.release.probes import OnnxFile, check_onnx_rules, check_release
from tests.release.crafted import CRAFTED, good, write_all
from tests.support import graphs
from tests.support.releases import draft, published

INPUTS: tuple[Tensor, ...] = (("embedding", "float32", (4,)),)
OUTPUTS: tuple[Tensor, ...] = (("upgraded", "float32", (3,)),)


def test_a_good_file_passes(tmp_path: Path) -> None:
    path = graphs.save(good(), tmp_path / "model.onnx")
    check_onnx_rules({"good": OnnxFile(path, INPUTS, OUTPUTS)})
    check_onnx_rules({})


def test_whole_releases_pass(tmp_path: Path) -> None:
    first = draft(tmp_path, 1)
    second = draft(tmp_path, 2, [first.manifest], int8=True)
    check_release(first.local_files, first.manifest)
    check_release(second.local_files, second.manifest)


def test_crafted_files_are_refused_each_for_its_own_reason(tmp_path: Path) -> None:
    assert len(CRAFTED) >= 15
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reasons = set()
    for name, path in write_all(tmp_path).items():
        with pytest.raises(OnnxRuleError) as caught:
            check_onnx_file(path, INPUTS, OUTPUTS)
        print(f"{name}: {caught.value}")
        reasons.add(str(caught.value)[:30])
    assert len(reasons) > 15
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown} kB more"


def test_a_refusal_names_the_file(tmp_path: Path) -> None:
    crafted = write_all(tmp_path)
    bad = OnnxFile(crafted["control_flow"], INPUTS, OUTPUTS)
    fine = OnnxFile(graphs.save(good(), tmp_path / "good.onnx"), INPUTS, OUTPUTS)
    with pytest.raises(VerificationError, match=r"second\.onnx: .*subgraph"):
        check_onnx_rules({"first.onnx": fine, "second.onnx": bad})


@pytest.mark.parametrize(
    "data", [b"", b"\0", b"not a model", b"\xff" * 1000, b"\x08" * 100], ids=lambda d: repr(d[:9])
)
def test_what_is_no_model_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(data)
    with pytest.raises(OnnxRuleError):
        check_onnx_file(path, INPUTS, OUTPUTS)


def test_files_that_are_missing_or_too_large_are_refused(tmp_path: Path) -> None:
    large = tmp_path / "large.onnx"
    with large.open("wb") as file:
        file.truncate(2**30)
    for path, reason in ((large, "bytes"), (tmp_path / "missing", "cannot be checked")):
        with pytest.raises(VerificationError, match=reason):
            check_onnx_rules({"model": OnnxFile(path, INPUTS, OUTPUTS)})


def varint(number: int) -> bytes:
    """A number as protobuf writes it."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def mutations(data: bytes, count: int, seed: int) -> list[bytes]:
    """Flipped bits, overwritten, cut, doubled and swapped pieces."""
    rng = random.Random(seed)
    made: list[bytes] = []
    while len(made) < count:
        mutated = bytearray(data)
        at = rng.randrange(len(data))
        size = rng.choice([1, 4, 64, 512])
        match rng.randrange(5):
            case 0:
                mutated[at] ^= 1 << rng.randrange(8)
            case 1:
                mutated[at : at + size] = rng.randbytes(len(mutated[at : at + size]))
            case 2:
                del mutated[at:]
            case 3:
                mutated[at:at] = mutated[at : at + size]
            case _:
                del mutated[at : at + size]
        if mutated != data:
            made.append(bytes(mutated))
    return made


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.faults)])
def test_mutated_files_never_reach_a_session(count: int, tmp_path: Path) -> None:
    """Bits of weights may flip unseen by any parser: it is the digest that refuses all of them."""
    first = draft(tmp_path, 1)
    path = first.local_files[manifest.embedder_path(1)]
    data = path.read_bytes()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for mutated in mutations(data, count, seed=count):
        path.write_bytes(mutated)
        with pytest.raises(VerificationError, match="expected the file with the digest"):
            open_embedder(first.local_files, first.manifest)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200_000, f"{grown} kB more"


@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.faults)])
def test_mutated_files_of_a_thief_who_can_sign_do_not_crash_the_checker(
    count: int, tmp_path: Path
) -> None:
    """With the right digest a damaged file is refused, or is a sound graph of other weights."""
    weights = graphs.save(good(), tmp_path / "model.onnx").read_bytes()
    files = {}
    for number, mutated in enumerate(mutations(weights, count, seed=7)):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(mutated)
        try:
            check_onnx_file(path, INPUTS, OUTPUTS)
        except OnnxRuleError:
            continue
        files[sha256_bytes(mutated)] = OnnxFile(path, INPUTS, OUTPUTS)
    assert len(files) < count / 2
    check_onnx_rules(files)


def test_the_manifest_decides_what_a_model_must_look_like(tmp_path: Path) -> None:
    first = draft(tmp_path, 1)
    wider = first.manifest.embedder.model_copy(update={"dim": graphs.DIM + 1})
    with pytest.raises(VerificationError, match="shape"):
        check_release(first.local_files, first.manifest.model_copy(update={"embedder": wider}))
    path = manifest.side_encoder_path(1)
    swapped = graphs.save(good(), tmp_path / "1" / path)
    assert first.manifest.side_encoder is not None
    encoder = first.manifest.side_encoder.model_copy(
        update={"file": published(tmp_path / "1", path)}
    )
    assert swapped.exists()
    with pytest.raises(VerificationError, match=path):
        check_release(
            first.local_files, first.manifest.model_copy(update={"side_encoder": encoder})
        )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("strings", "has the type string, expected one of float32, double, float16, int8, uint8, "),
        ("other_type", "its input 'embedding' is double, expected float32"),
    ],
)
def test_a_refused_type_is_named_with_what_is_allowed(
    name: str, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(OnnxRuleError) as caught:
        check_onnx_file(write_all(tmp_path)[name], INPUTS, OUTPUTS)
    assert sentence in str(caught.value)
