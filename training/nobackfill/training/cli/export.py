"""The command export.py: publish training runs as a release if they pass the gate."""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.class_folders import ImageListing, list_images
from nobackfill.digests import parse_percent
from nobackfill.errors import (
    AlreadyExistsError,
    ConfigurationError,
    GateFailedError,
    join_few,
)
from nobackfill.framing import Fit, Interpolation
from nobackfill.quality.gate import ReleaseEvidence, measure_release
from nobackfill.quality.listing import TextListing, list_texts, split_halves
from nobackfill.release.manifest import GateVerdict, Manifest
from nobackfill.release.publishing.metadata import SigningKeys
from nobackfill.release.publishing.publish import (
    PublishedRelease,
    check_keys,
    draft_folder,
    publish,
)
from nobackfill.release.trust.trust import Publication, read_publication
from nobackfill.training.cli.command import command_app
from nobackfill.training.cli.table import gate_table
from nobackfill.training.export.assembly import (
    ReleaseModels,
    add_runs,
    check_models,
    leave_out_training_images,
    parse_vectors_of,
)
from nobackfill.training.export.drafting import ReleaseDraft
from nobackfill.training.export.external import (
    Pixels,
    add_adapter,
    add_onnx_embedder,
    add_public_embedder,
)
from nobackfill.training.export.probes import make_probes, single_colour_warnings
from nobackfill.training.export.text_encoder import add_vectors

Onnx = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="ONNX file of an embedder to publish in place of --embedder; its input is uint8 "
        "[n,H,W,3] or float32 [n,3,H,W], its output float32 [n,dim]. Without it, no ONNX file is "
        "read.",
    ),
]
PublicWeights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="NAME",
        help="Public model to publish unchanged in place of --embedder: timm:NAME.TAG, "
        "open_clip:NAME/TAG or torchvision:NAME/WEIGHTS. Without it, no public model is loaded.",
    ),
]
Mean = Annotated[
    tuple[float, float, float],
    typer.Option(
        help="Means of red, green and blue in (value/255 - mean) / std, which is the input of an "
        "--onnx model that takes float32."
    ),
]
Std = Annotated[
    tuple[float, float, float],
    typer.Option(
        help="Standard deviations of red, green and blue in (value/255 - mean) / std, which is the "
        "input of an --onnx model that takes float32."
    ),
]
FitOption = Annotated[
    Fit,
    typer.Option(
        "--fit",
        help="How pictures are brought to the input size of the --onnx model: stretch them, crop "
        "their middle, or pad them with a border.",
    ),
]
Shortest = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Pixels of the shortest side to which --fit crop scales a picture before it cuts the "
        "middle out. Without it, that side gets the model's input size.",
    ),
]
Interpolating = Annotated[
    Interpolation,
    typer.Option(
        "--interpolation", help="Filter that scales pictures to the input size of the --onnx model."
    ),
]
TextFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Text model to publish: a folder that sentence-transformers saved, which is exported "
        "to ONNX if need be, or one with model.onnx and tokenizer.json. It must embed into the "
        "same space as the image embedder, if there is one. Without it, the release embeds no "
        "texts.",
    ),
]
EvalTexts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON Lines file to measure text search on, which is only read: each line has id, "
        "text and label, a class (with --eval, one of its classes). In place of labels, each line "
        "may have a query, a text that should find it. Without this file, text search is not "
        "measured.",
    ),
]
VectorsOf = Annotated[
    str | None,
    typer.Option(
        metavar="NAME:DIM",
        help="Publish a space of existing vectors without a model: the name of the model that "
        "computed them, and their dimension. Without it, the release must contain a model.",
    ),
]
Upgrades = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="RUN",
        help="Model to publish that upgrades vectors of an older release to this one: the run "
        "folder of a training, or the FILE.onnx that `nobackfill fit` wrote; repeat it for more. "
        "Without it, the release has no upgrade.",
    ),
]
Adapters = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE",
        help="Query adapter, which maps queries of this release to vectors of an older one: the "
        "FILE.onnx that `nobackfill fit --adapter` wrote; repeat it for more. Gateways then search "
        "the old vectors from the first minute. Without it, the release has no adapter.",
    ),
]
QueryFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Folder of a second text model that embeds only queries, with the tokenizer of "
        "--text-encoder. Without it, --text-encoder embeds queries, too.",
    ),
]


@dataclass(frozen=True)
class EvaluationData:
    """The data that a release is measured on: images, texts, or images with texts as queries.

    Attributes:
        images: the images of --eval; None without it.
        texts: the texts of --eval-texts; None without it.
        seed: divides them into a half for the calibration and one for the gate.
    """

    images: ImageListing | None
    texts: TextListing | None
    seed: int

    def listing(self) -> ImageListing | None:
        """Return the items of the galleries: the images, else the texts, else None.

        With images the texts are only queries.
        """
        return self.texts if self.images is None else self.images

    def for_images(self) -> TextListing | None:
        """Return the texts that are queries for images; None without images or texts.

        Without images, texts are a gallery of their own, see `listing`.
        """
        return None if self.images is None else self.texts

    def check(self, manifests: Mapping[int, Manifest]) -> None:
        """Check that every release can embed the evaluation data; without any, do nothing.

        Args:
            manifests: the published releases and the draft, by number.

        Raises:
            ConfigurationError: texts without labels are given with images; or a release has no
                image embedder for --eval, or no text encoder for --eval-texts. The message names
                the releases.
        """
        if self.images is not None and self.texts is not None and self.texts.queries:
            raise ConfigurationError(
                "--eval-texts FILE with --eval FOLDER: expected a key 'label' in each line of "
                "FILE, the class folder of the pictures that the text describes; found lines "
                "without it"
            )
        known = sorted(manifests.items())
        for option, kind, wanted, blind in (
            ("--eval", "pictures", self.images, [n for n, m in known if not m.embedder.file]),
            ("--eval-texts", "texts", self.texts, [n for n, m in known if not m.text_encoder]),
        ):
            if wanted is not None and blind:
                raise ConfigurationError(
                    f"{option} measures searches of {kind}, but release {join_few(blind)} has no "
                    f"model that embeds them; publish without {option}, and with --force if no "
                    "other option measures the release"
                )


_EPILOG = """
Exports each run to ONNX, and refuses one whose outputs differ from torch's by more than 1e-4.
Writes golden probes (test inputs with the outputs that the models must give), measures the exported
files on --eval, signs and publishes. One half of --eval fits the calibration (from distances to
probabilities), the other decides the gate. Runs come from `python training/train.py`.

Keys: the first publish makes development keys in DIR.keys. To keep the keys of root and targets
offline, make them before: `publication keys --model-repo DIR --root-key FILE --targets-key FILE`.
Every later export then needs --targets-key.

Gate: searches of older vectors by the new release (directly, by a query adapter, and after each
upgrade) must beat the older release itself, M(new, served old) > M(old, old), in mAP and CMC-1. The
lower bound of the paired bootstrap's 95 % interval must be above 0, with int8 files and with
float32 files. Otherwise no release is published, and a table shows why; --force publishes it all
the same and records that in the manifest. Release 1 has no predecessor to beat. Without --eval a
release has no calibration, so its hits have no score. Images of --eval that the runs were trained
on are recognised by content. A few are left out; with many of them, nothing is published.

A gallery takes the best measured route, a chain of upgrades, to the newest release. Each release
therefore needs an upgrade from its predecessor; a second one from an older release makes a direct
route.

Examples:

python training/export.py --model-repo model_repo --release 1 --embedder build/digits/embedder-1
--side-encoder build/digits/side_encoder-1 --eval photos/eval

python training/export.py --model-repo model_repo --release 2 --embedder build/digits/embedder-2
--side-encoder build/digits/side_encoder-2 --upgrade build/digits/upgrade-1-2 --eval photos/eval

Devices follow by `edge-client init --from URL --root DIR/1.root.json` once, and `edge-client sync`
after each release. URL is a gateway (`gateway serve --model-repo DIR`) or any static host of DIR
(`python -m http.server --directory DIR`). `publication --help` shows how to renew and withdraw.

Exit codes: 0 published, 65 the gate or a check failed, 73 cannot write or the number is taken,
75 another process is publishing, 78 wrong configuration.
"""


def main(
    model_repo: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Publication folder to which the release is written; the first publish creates "
            "it.",
        ),
    ],
    release: Annotated[
        int,
        typer.Option(min=1, help="Number of the new release; it must exceed every published one."),
    ],
    embedder: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run folder of the finished training of kind embedder to publish; it is only "
            "read. Required, unless --onnx, --weights, --text-encoder or --vectors-of is given.",
        ),
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
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Run folder of the finished training of kind side_encoder to publish; it is only "
            "read. The model computes side-information, a second vector that later upgrades read. "
            "Without it and without --keep-side-encoder, galleries store none.",
        ),
    ] = None,
    keep_side_encoder: Annotated[
        bool,
        typer.Option(
            "--keep-side-encoder",
            help="Publish the newest release's model of side-information again, so that the "
            "side-information (second vectors) that galleries store stays valid. Without this "
            "flag, it is not used.",
        ),
    ] = False,
    upgrade: Upgrades = None,
    adapter: Adapters = None,
    evaluate: Annotated[
        Path | None,
        typer.Option(
            "--eval",
            metavar="FOLDER",
            help="Folder of images that no run was trained on, one folder in it for each class. "
            "Half of them fit the calibration (from distances to probabilities), the others decide "
            "the gate (whether the release beats the older one). Without it, image search is not "
            "measured.",
        ),
    ] = None,
    eval_texts: EvalTexts = None,
    split_seed: Annotated[
        int,
        typer.Option(
            help="Seed that divides --eval and --eval-texts at random into two halves: one to fit "
            "the calibration, one to test the release."
        ),
    ] = 0,
    int8_loss: Annotated[
        float,
        typer.Option(
            min=0,
            help="Percentage points of mAP that the int8 file of an upgrade may lose against the "
            "float32 file; an int8 file that loses more is not published.",
        ),
    ] = 0.3,
    share: Annotated[
        str,
        typer.Option(
            help="Share of the devices that get the release at first, in percent; `publication "
            "--help` shows how to raise it later."
        ),
    ] = "100%",
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Publish even if the gate, the test against the older release, fails, was not "
            "measured, or measures training images; the manifest records it. Without this flag, "
            "such a release is refused.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Export, measure and judge the release, but write nothing to DIR. Without this "
            "flag, a release that passes is published.",
        ),
    ] = False,
    targets_key: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="PEM file of the targets key, which signs the release; it is only read.",
            show_default="DIR.keys/targets.pem",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the verdict, figures and files as one JSON object on stdout. Without this "
            "flag, a table and one line are printed.",
        ),
    ] = False,
) -> None:
    """Publish an embedder, its side encoder, upgrades and query adapters as release N."""
    devices = parse_percent(share)
    runs = ReleaseModels(embedder, text_encoder, query_encoder, side_encoder, tuple(upgrade or ()))
    check_models(runs, onnx, weights, vectors_of)
    if side_encoder is not None and keep_side_encoder:
        raise ConfigurationError(
            "expected --side-encoder RUN for a new side-information encoder, or "
            "--keep-side-encoder for the newest release's; got both"
        )
    with draft_folder(model_repo) as folder:
        published = read_publication(model_repo, folder / "trusted")
        keys, first = _keys(model_repo, targets_key), not published.manifests
        _check_number(release, published, has_evaluation=bool(evaluate or eval_texts), force=force)
        listing, count_trained = _evaluation(evaluate, split_seed, runs.run_folders(), force=force)
        evaluation = EvaluationData(
            listing, None if eval_texts is None else list_texts(eval_texts), split_seed
        )
        draft = ReleaseDraft(
            release,
            folder,
            published.manifests,
            model_repo,
            withdrawn_releases=published.withdrawn_releases,
        )
        _add_foreign(
            draft, onnx, Pixels(mean, std, fit, shortest, interpolation), weights, vectors_of
        )
        add_runs(draft, runs, keep_side_encoder)
        for file in adapter or ():
            add_adapter(draft, file)
        manifest, evidence = _measure(draft, published, evaluation, int8_loss)
        manifest = _judge(manifest, evidence, count_trained, force=force, first=first)
        result = publish(model_repo, draft.finish(manifest), keys, dry_run, devices)
    _report(manifest, evidence, result, as_json)


def _add_foreign(
    draft: ReleaseDraft,
    onnx: Path | None,
    pixels: Pixels,
    weights: str | None,
    vectors_of: str | None,
) -> None:
    """Add an embedder that was trained elsewhere, or the name of one that is not available."""
    if onnx is not None:
        add_onnx_embedder(draft, onnx, pixels)
    if weights is not None:
        add_public_embedder(draft, weights)
    if vectors_of is not None:
        add_vectors(draft, *parse_vectors_of(vectors_of))


def _keys(model_repo: Path, targets_key: Path | None) -> SigningKeys:
    """Read the signing keys now: an error must not follow minutes of measuring."""
    keys = SigningKeys.of_publication(model_repo, {"targets": targets_key} if targets_key else None)
    check_keys(model_repo, keys)
    return keys


def _evaluation(
    folder: Path | None, split_seed: int, runs: list[Path], *, force: bool
) -> tuple[ImageListing | None, int]:
    """Return the images to measure on, and how many of them were trained on.

    Refuses too few or trained-on images now, before minutes of exporting."""
    if folder is None:
        return None, 0
    listing = list_images(folder)
    split_halves(listing, split_seed)
    return leave_out_training_images(listing, runs, force=force)


def _check_number(
    release: int, published: Publication, *, has_evaluation: bool, force: bool
) -> None:
    """Refuse a bad release number before anything is exported."""
    newest = max(published.manifests, default=0)
    if release <= newest:
        raise AlreadyExistsError(
            f"--release {release}: expected a number above {newest}, the newest published release; "
            f"releases never change, so publish this one as --release {newest + 1}"
        )
    if newest and not has_evaluation and not force:
        raise GateFailedError(
            f"release {release} has predecessors, so the gate must measure whether it beats them: "
            "give --eval FOLDER of images that no run was trained on (or publish unmeasured with "
            "--force)"
        )


def _measure(
    draft: ReleaseDraft, published: Publication, evaluation: EvaluationData, int8_loss: float
) -> tuple[Manifest, ReleaseEvidence | None]:
    """Return the manifest with probes and, if there are images, with calibration and evidence."""
    manifest = draft.manifest(make_probes(draft))
    for sentence in single_colour_warnings(manifest, draft.all_files()):
        print(f"release {draft.number}: {sentence}", file=sys.stderr)
    listing = evaluation.listing()
    if listing is None:
        print(
            f"release {draft.number} is not measured: its hits will have no score (None) and its "
            "routes no quality; to measure it, give --eval FOLDER of images or --eval-texts FILE",
            file=sys.stderr,
        )
        # Unmeasured quantised files are not published.
        bare = tuple(u.model_copy(update={"int8_file": None}) for u in manifest.upgrades)
        return manifest.model_copy(update={"upgrades": bare}), None
    evaluation.check({**published.manifests, manifest.release: manifest})
    manifest, evidence = measure_release(
        manifest,
        published,
        draft.all_files(),
        listing,
        seed=evaluation.seed,
        int8_loss=int8_loss / 100,
        texts=evaluation.for_images(),
    )
    update = {
        "evidence": evidence.cells,
        "evidence_by_text": evidence.text_query_cells,
        "unlabelled": evidence.unlabelled_cells,
        "routes": evidence.routes,
        "calibration": evidence.calibrations,
    }
    return manifest.model_copy(update=update), evidence


def _judge(
    manifest: Manifest,
    evidence: ReleaseEvidence | None,
    count_trained: int,
    *,
    force: bool,
    first: bool,
) -> Manifest:
    """Return the manifest with the gate's verdict.

    Raises GateFailedError, with the table, if the gate fails without `force`. `count_trained` is
    the number of evaluation images that were trained on.
    """
    if evidence is not None:
        verdict = evidence.gate_verdict
    elif first:
        verdict = GateVerdict(verdict="first")
    else:
        verdict = GateVerdict(verdict="not_measured", detail="published without --eval")
    if verdict.verdict in ("failed", "not_measured"):
        if evidence is not None and not force:
            raise GateFailedError(
                f"release {manifest.release} does not pass the gate, the test against its "
                "predecessors, and was not published: "
                f"{verdict.detail}. Add an --upgrade for older vectors that have none, leave out "
                "an --adapter that fails, train longer or on more images, or publish with --force\n"
                + gate_table(evidence)
            )
        verdict = verdict.model_copy(update={"forced": True})
    if count_trained:
        detail = f"{verdict.detail}; measured on {count_trained} training images".removeprefix("; ")
        verdict = verdict.model_copy(update={"forced": True, "detail": detail})
    return Manifest.model_validate(manifest.model_copy(update={"gate": verdict}).model_dump())


def _report(
    manifest: Manifest, evidence: ReleaseEvidence | None, result: PublishedRelease, as_json: bool
) -> None:
    if result.new_key_folder is not None:
        print(
            f"The first publish wrote DEVELOPMENT KEYS to {result.new_key_folder}: anybody who "
            "has them can sign releases. Move root.pem and targets.pem offline before real "
            "devices trust this publication",
            file=sys.stderr,
        )
    if as_json:
        summary = {
            "release": manifest.release,
            "space": manifest.space,
            "written": not result.dry_run,
            "gate": manifest.gate.model_dump(),
            "cells": [cell.model_dump() for cell in manifest.evidence],
            "unlabelled": [cell.model_dump() for cell in manifest.unlabelled],
            "routes": [route.model_dump() for route in manifest.routes],
            "files": dict(result.file_sizes),
        }
        print(json.dumps(summary))
        return
    if evidence is not None:
        print(gate_table(evidence))
    verb = "would be published (dry run)" if result.dry_run else "published"
    forced = ", FORCED" if manifest.gate.forced else ""
    print(
        f"release {manifest.release} {verb}: gate {manifest.gate.verdict}{forced}, "
        f"{len(result.file_sizes)} files, {sum(result.file_sizes.values()) / 2**20:.1f} MiB"
    )


app = command_app("export.py", main, _EPILOG)

if __name__ == "__main__":
    app()
