"""`python training/export.py`: publish training runs as a release, if it passes the gate."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.class_folders import Listing, list_images
from nobackfill.digests import percent
from nobackfill.errors import AlreadyExistsError, ConfigurationError, GateFailedError, few
from nobackfill.framing import Fit, Interpolation
from nobackfill.quality.gate import Evidence, measure_release
from nobackfill.quality.listing import TextListing, halves, list_texts
from nobackfill.release.manifest import GateVerdict, Manifest
from nobackfill.release.publishing.metadata import Keys
from nobackfill.release.publishing.publish import (
    PublishedRelease,
    check_keys,
    drafting,
    publish,
)
from nobackfill.release.trust.trust import Publication, read_publication
from nobackfill.training.cli.command import command_app
from nobackfill.training.cli.table import gate_table
from nobackfill.training.export.assembly import (
    Runs,
    add_runs,
    check_models,
    named_vectors,
    unseen,
)
from nobackfill.training.export.drafting import Release
from nobackfill.training.export.external import Pixels, add_onnx_embedder, add_public_embedder
from nobackfill.training.export.probes import make_probes, plain_trouble
from nobackfill.training.export.text_encoder import add_vectors

Onnx = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="or an embedder of your own: uint8 [n,H,W,3] or float32 [n,3,H,W] -> [n,dim]",
    ),
]
PublicWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help="or a public one as it is: timm:NAME.TAG, open_clip:NAME/TAG, "
        "torchvision:NAME/WEIGHTS",
    ),
]
Mean = Annotated[
    tuple[float, float, float], typer.Option(help="a float32 --onnx takes (x/255 - mean) / std")
]
Std = Annotated[tuple[float, float, float], typer.Option(help="see --mean")]
FitOption = Annotated[Fit, typer.Option("--fit", help="how --onnx takes pictures of other aspects")]
Shortest = Annotated[
    int | None, typer.Option(min=1, help="with --fit crop: pixels of the shortest side")
]
Interpolating = Annotated[
    Interpolation, typer.Option("--interpolation", help="how --onnx wants pictures scaled")
]
TextFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="a text model: ONNX with tokenizer.json, of one space"),
]
EvalTexts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSONL of id, text and label, its class or one of --eval's; without any labels the "
        "texts are to be found by their `query`, or by a part of themselves",
    ),
]
VectorsOf = Annotated[
    str | None, typer.Option(metavar="NAME:DIM", help="no model at all: what made the vectors")
]
Upgrades = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="RUN", help="upgrade into it, or `nobackfill fit`'s FILE.onnx; may be repeated"
    ),
]
QueryFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="another model for texts that ask, beside --text-encoder"),
]


@dataclass(frozen=True)
class EvaluationData:
    """What a release is measured with: images, texts, or images that are asked for by texts.

    Of --eval and --eval-texts; `seed` splits what is listed into halves.
    """

    images: Listing | None
    texts: TextListing | None
    seed: int

    def listing(self) -> Listing | None:
        """What galleries hold: texts only where there are no images."""
        return self.texts if self.images is None else self.images

    def for_images(self) -> TextListing | None:
        """Texts that ask for the images."""
        return None if self.images is None else self.texts

    def check(self, manifests: Mapping[int, Manifest]) -> None:
        """Raises ConfigurationError where a release does not embed what is asked with."""
        if self.images is not None and self.texts is not None and self.texts.queries:
            raise ConfigurationError(
                "--eval-texts beside --eval: expected a 'label' in each text, the class of the "
                "pictures that it asks for"
            )
        known = sorted(manifests.items())
        for option, kind, wanted, blind in (
            ("--eval", "pictures", self.images, [n for n, m in known if not m.embedder.file]),
            ("--eval-texts", "texts", self.texts, [n for n, m in known if not m.text_encoder]),
        ):
            if wanted is not None and blind:
                raise ConfigurationError(
                    f"{option} measures {kind}, and release {few(blind)} embeds none; publish "
                    f"without {option}, with --force where nothing else measures it"
                )


_EPILOG = """
Exports each run to ONNX (compared with torch output for output, refused beyond 1e-4), writes golden
probes, measures the exported files on --eval (one half fits the calibration, the other decides the
gate), signs and publishes. Runs come from `python training/train.py`.

With no keys prepared the first publish makes development keys in DIR.keys. To keep those of root
and targets offline, make them before: `publication keys --model-repo DIR --root-key FILE
--targets-key FILE`; then every export needs --targets-key.

The gate: every way in which older vectors would be served (direct search, each route) must beat the
older release on its own, M(new, served old) > M(old, old), for mAP and CMC-1, with the paired
bootstrap's 95 % lower bound above 0; with the int8 files that are served, and with float32 files
alone. Otherwise nothing is published and the table shows why; --force publishes all the same, and
the manifest says so. Release 1 has no predecessor: without --eval it is published all the same, but
has no calibration, so that hits have no score. Images of --eval that the runs were trained on,
known by their content, are left out where they are few, else refused.

A gallery takes the best measured route to the newest release, so each release needs an upgrade from
its predecessor (the gate asks for it); one more from an older release makes a direct route.

Example:

python training/export.py --model-repo model_repo --release 1 --embedder build/digits/embedder-1
--side-encoder build/digits/side_encoder-1 --eval photos/eval

python training/export.py --model-repo model_repo --release 2 --embedder build/digits/embedder-2
--side-encoder build/digits/side_encoder-2 --upgrade build/digits/upgrade-1-2 --eval photos/eval

Devices then follow: `edge-client init --from URL --root DIR/1.root.json` once, `edge-client sync`
after each release. URL is a gateway (`gateway serve --model-repo DIR`) or any static host of DIR
(`python -m http.server --directory DIR`). `publication --help` renews, withdraws, verifies.

Exit codes: 0 published, 65 the gate or a check failed, 73 cannot write or the number is taken,
75 somebody else is publishing, 78 wrong configuration.
"""


def main(
    model_repo: Annotated[Path, typer.Option(metavar="DIR", help="publication folder")],
    release: Annotated[int, typer.Option(min=1, help="number of the new release")],
    embedder: Annotated[
        Path | None, typer.Option(metavar="RUN", help="run folder of the embedder")
    ] = None,
    onnx: Onnx = None,
    weights: PublicWeights = None,
    mean: Mean = (0.0, 0.0, 0.0),
    std: Std = (1.0, 1.0, 1.0),
    fit: FitOption = "stretch",
    shortest: Shortest = None,
    interpolation: Interpolating = "bilinear",
    text_encoder: TextFolder = None,
    query_encoder: QueryFolder = None,
    vectors_of: VectorsOf = None,
    side_encoder: Annotated[
        Path | None, typer.Option(metavar="RUN", help="run folder of the side-information encoder")
    ] = None,
    keep_side_encoder: Annotated[
        bool, typer.Option("--keep-side-encoder", help="go on with the newest release's")
    ] = False,
    upgrade: Upgrades = None,
    evaluate: Annotated[
        Path | None, typer.Option("--eval", metavar="FOLDER", help="class folders not trained on")
    ] = None,
    eval_texts: EvalTexts = None,
    split_seed: Annotated[int, typer.Option(help="splits --eval into calibration and gate")] = 0,
    int8_loss: Annotated[
        float, typer.Option(min=0, help="mAP points an int8 twin may lose to be published")
    ] = 0.3,
    share: Annotated[str, typer.Option(help="percent of the devices it is for at first")] = "100%",
    force: Annotated[bool, typer.Option("--force", help="publish past a failed gate")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="do all but write to DIR")] = False,
    targets_key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="the targets key", show_default="DIR.keys/targets.pem"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout")] = False,
) -> None:
    """Publish an embedder, its side encoder and upgrades into it as release N."""
    devices = percent(share)
    runs = Runs(embedder, text_encoder, query_encoder, side_encoder, tuple(upgrade or ()))
    check_models(runs, onnx, weights, vectors_of)
    if side_encoder is not None and keep_side_encoder:
        raise ConfigurationError("expected --side-encoder or --keep-side-encoder, not both")
    with drafting(model_repo) as folder:
        published = read_publication(model_repo, folder / "trusted")
        keys, first = _keys(model_repo, targets_key), not published.manifests
        _check_number(release, published, measured=bool(evaluate or eval_texts), force=force)
        listing, learnt = _evaluation(evaluate, split_seed, runs.trained(), force=force)
        asked = EvaluationData(
            listing, None if eval_texts is None else list_texts(eval_texts), split_seed
        )
        draft = Release(
            release, folder, published.manifests, model_repo, withdrawn=published.withdrawn
        )
        _brought(draft, onnx, Pixels(mean, std, fit, shortest, interpolation), weights, vectors_of)
        add_runs(draft, runs, keep_side_encoder)
        manifest, evidence = _measured(draft, published, asked, int8_loss)
        manifest = _judged(manifest, evidence, learnt, force=force, first=first)
        done = publish(model_repo, draft.finished(manifest), keys, dry_run, devices)
    _report(manifest, evidence, done, as_json)


def _brought(
    draft: Release, onnx: Path | None, pixels: Pixels, weights: str | None, vectors_of: str | None
) -> None:
    """An embedder that was trained elsewhere, or the name of one that is gone."""
    if onnx is not None:
        add_onnx_embedder(draft, onnx, pixels)
    if weights is not None:
        add_public_embedder(draft, weights)
    if vectors_of is not None:
        add_vectors(draft, *named_vectors(vectors_of))


def _keys(model_repo: Path, targets_key: Path | None) -> Keys:
    """The signing keys, looked for now and not after minutes of measuring."""
    keys = Keys.of(model_repo, {"targets": targets_key} if targets_key else None)
    check_keys(model_repo, keys)
    return keys


def _evaluation(
    folder: Path | None, split_seed: int, runs: list[Path], *, force: bool
) -> tuple[Listing | None, int]:
    """The images to measure on, and how many of them were trained on: refused now, and not after
    minutes of exporting, if too few or learnt.
    """
    if folder is None:
        return None, 0
    listing = list_images(folder)
    halves(listing, split_seed)
    return unseen(listing, runs, force=force)


def _check_number(release: int, published: Publication, *, measured: bool, force: bool) -> None:
    """What can be refused before anything is exported."""
    newest = max(published.manifests, default=0)
    if release <= newest:
        raise AlreadyExistsError(
            f"--release {release}: expected a number above {newest}, the newest published; "
            "releases are immutable and numbers only grow"
        )
    if newest and not measured and not force:
        raise GateFailedError(
            f"release {release} has predecessors, so the gate must measure it: give --eval FOLDER "
            "with images that nothing was trained on (or publish unmeasured with --force)"
        )


def _measured(
    draft: Release, published: Publication, asked: EvaluationData, int8_loss: float
) -> tuple[Manifest, Evidence | None]:
    """The manifest with probes, and with calibration and evidence where there are images."""
    manifest = draft.manifest(make_probes(draft))
    for sentence in plain_trouble(manifest, draft.all_files()):
        print(f"release {draft.number}: {sentence}", file=sys.stderr)
    listing = asked.listing()
    if listing is None:
        print(
            f"release {draft.number}: warning: measured on nothing, so hits have no score (None) "
            "and routes no quality; give --eval FOLDER of class folders, or --eval-texts FILE",
            file=sys.stderr,
        )
        # What nobody measured is not published quantised.
        bare = tuple(u.model_copy(update={"int8_file": None}) for u in manifest.upgrades)
        return manifest.model_copy(update={"upgrades": bare}), None
    asked.check({**published.manifests, manifest.release: manifest})
    manifest, evidence = measure_release(
        manifest,
        published,
        draft.all_files(),
        listing,
        seed=asked.seed,
        int8_loss=int8_loss / 100,
        texts=asked.for_images(),
    )
    update = {
        "evidence": evidence.cells,
        "evidence_by_text": evidence.cells_by_text,
        "unlabelled": evidence.unlabelled,
        "routes": evidence.routes,
        "calibration": evidence.calibration,
    }
    return manifest.model_copy(update=update), evidence


def _judged(
    manifest: Manifest, evidence: Evidence | None, learnt: int, *, force: bool, first: bool
) -> Manifest:
    """The manifest with the gate's verdict; `learnt` of the images it was measured on were trained
    on. Raises GateFailedError with the table that shows why.
    """
    if evidence is not None:
        verdict = evidence.verdict
    elif first:
        verdict = GateVerdict(verdict="first")
    else:
        verdict = GateVerdict(verdict="not_measured", detail="published without --eval")
    if verdict.verdict in ("failed", "not_measured"):
        if evidence is not None and not force:
            raise GateFailedError(
                f"release {manifest.release} does not pass the gate: {verdict.detail}. Nothing was "
                "published; name an --upgrade for vectors that have none, train longer or on "
                "more, or publish with --force\n" + gate_table(evidence)
            )
        verdict = verdict.model_copy(update={"forced": True})
    if learnt:
        detail = f"{verdict.detail}; measured on {learnt} training images".removeprefix("; ")
        verdict = verdict.model_copy(update={"forced": True, "detail": detail})
    return Manifest.model_validate(manifest.model_copy(update={"gate": verdict}).model_dump())


def _report(
    manifest: Manifest, evidence: Evidence | None, done: PublishedRelease, as_json: bool
) -> None:
    if done.new_keys is not None:
        print(
            f"DEVELOPMENT KEYS made in {done.new_keys}: whoever holds them signs releases. Keep "
            "root and targets keys offline before anything real depends on them",
            file=sys.stderr,
        )
    if as_json:
        summary = {
            "release": manifest.release,
            "space": manifest.space,
            "written": done.written,
            "gate": manifest.gate.model_dump(),
            "cells": [cell.model_dump() for cell in manifest.evidence],
            "unlabelled": [cell.model_dump() for cell in manifest.unlabelled],
            "routes": [route.model_dump() for route in manifest.routes],
            "files": dict(done.files),
        }
        print(json.dumps(summary))
        return
    if evidence is not None:
        print(gate_table(evidence))
    verb = "published" if done.written else "would be published (dry run)"
    forced = ", FORCED" if manifest.gate.forced else ""
    print(
        f"release {manifest.release} {verb}: gate {manifest.gate.verdict}{forced}, "
        f"{len(done.files)} files, {sum(done.files.values()) / 2**20:.1f} MiB"
    )


app = command_app("export.py", main, _EPILOG)

if __name__ == "__main__":
    app()
