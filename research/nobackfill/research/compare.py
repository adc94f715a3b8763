"""The command compare.py: train and measure every method on the same splits and metrics."""

import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from nobackfill.class_folders import list_images
from nobackfill.durable import lock_file, write_file
from nobackfill.errors import BusyError, ConfigurationError
from nobackfill.research.catalogue import digest_of_rows, list_rows
from nobackfill.research.cells import add_class_ranges, is_class_known_to_old, read_cells
from nobackfill.research.claims import CLAIMS
from nobackfill.research.images import (
    check_classes,
    comparison_seeds,
    development_preset,
    link_published,
    prepare_seed_images,
    read_published,
    require_same_images,
    write_digits,
)
from nobackfill.research.pages import results_page, rewrite_tables
from nobackfill.research.presets import (
    DIGITS,
    PRESETS,
    Preset,
    Split,
    Values,
    folder_preset,
    preset_named,
    scale_preset,
)
from nobackfill.research.protocols import ProtocolRow, summarise_protocols, write_protocols
from nobackfill.research.published import TRAIN
from nobackfill.research.results import (
    MAIN,
    Provenance,
    Results,
    cost_points,
    draw_costs,
    write_results,
)
from nobackfill.research.rivals.rows import list_rivals
from nobackfill.research.rows import ComparisonPlace
from nobackfill.research.serve import measure_costs
from nobackfill.research.summary import MeasuredRow, summarise
from nobackfill.research.tasks import Planned, cells_path, row_images, run_tasks
from nobackfill.research.vector_bench import bench_page, compare_vectors, read_vectors, write_bench
from nobackfill.training.cli.command import command_app

_CPUINFO = Path("/proc/cpuinfo")


def describe_machine() -> str:
    """Describe processor, cores, accelerator and torch's version, without the machine's name.

    The processor is only an architecture where /proc/cpuinfo has no model. The first GPU counts.
    """
    text = _CPUINFO.read_text("utf-8") if _CPUINFO.is_file() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = model[1].strip() if model else platform.machine()
    accelerator = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{name}, {os.cpu_count()} cores{accelerator}, torch {torch.__version__}"


_EPILOG = """
Trains every model and measures every row of the table, --jobs of them at a time. Finished work is
used again from OUT, so an interrupted comparison resumes; remove a folder to train it again.
OUT/NAME belongs to the images of its first run; other images are refused.

Writes OUT/NAME.json, OUT/NAME.md and OUT/NAME.svg. Groups of --methods and --once: core,
public_protocol, strong, core_unseen, core_unseen_compatible, bct_family, dmu_family, adapted,
stationary, variants, new_data, arcface, architectures, maps, transforms, chains, noise,
allocations, long_chain, foreign, disjoint, side_information, sizes, embedding_sizes,
old_networks, scenarios, ablations, parts, limits.

--development uses neither the test images nor the unseen classes of the tables, and other seeds.
Select methods and options with it, then run without it for the figures of a table.

--page writes the tables of a page, such as docs/methods.md, from existing results.

--vectors compares maps on frozen vectors of your own, in minutes and without images: an .npz with
old, new, test_old and test_new, and side, labels, test_side and test_labels if you have them.
--methods then names rivals, the maps to compare (research/nobackfill/research/rivals); all run by
default.

Examples:

python training/compare.py --data digits --seeds 1 --methods core

python training/compare.py --data cifar100 --images cifar100 --jobs 2

python training/compare.py --vectors features.npz --pairs 10000 --seeds 1

python training/compare.py --page docs/methods.md

Exit codes: 0 done, 1 a training diverged, 65 refused data, 73 cannot write, 75 another compare.py
works in OUT, 78 wrong configuration.
"""


def main(
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FOLDER",
            help="Data set to train and test on: digits, cifar100-cpu, cifar100-gpu, cifar100, "
            "cifar100-fct, imagenet, places365, vggface2, gldv2, ijbc, ms1mv3, market1501, or a "
            "folder of images with one folder in it for each class. Required, unless --page or "
            "--vectors is given.",
        ),
    ] = None,
    seeds: Annotated[
        int,
        typer.Option(
            min=1, help="Number of random seeds; every model is trained again with each of them."
        ),
    ] = 3,
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...",
            help="Methods and groups of methods to compare, separated by commas. With --vectors, "
            "names of rivals: the maps of this and of other projects that are fitted and compared.",
            show_default="all that the data set's preset lists; with --vectors all rivals",
        ),
    ] = None,
    first_seed_methods: Annotated[
        str | None,
        typer.Option(
            "--once",
            metavar="NAME,...",
            help="Further methods and groups, separated by commas, that are trained with the first "
            "seed only. Without it, every method runs with all seeds.",
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder with the data set that --data names, which is only read: of CIFAR-100 the "
            "folders train and test, of others the layout in which they are published "
            "(docs/training.md). Not used for digits and for a folder.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Folder to which trained models, measured figures and result files are written; "
            "finished trainings in it are used again.",
        ),
    ] = Path("build/compare"),
    jobs: Annotated[
        int, typer.Option(min=1, help="Number of processes that train and measure at a time.")
    ] = min(2, os.cpu_count() or 1),
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="auto|HOST:PORT",
            help="Address of a Ray cluster to train on; its nodes must see the folders of --out "
            "and --images under the same paths. Without it, processes of this machine train.",
        ),
    ] = None,
    development: Annotated[
        bool,
        typer.Option(
            "--development",
            help="Compare on images, classes and seeds that the published tables do not use, so "
            "that you can select methods and options on them. Without this flag, those of the "
            "tables are used.",
        ),
    ] = False,
    page: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="Write the generated tables of this page or of this result file again from "
            "stored results, and train nothing; repeat it for more. Without it, no page is "
            "written.",
        ),
    ] = None,
    vectors: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE.npz",
            help="Compare maps on the stored vectors of this file and train no image model; "
            "repeat it to read several files as one. Without it, the images of --data are used.",
        ),
    ] = None,
    pairs: Annotated[
        int | None,
        typer.Option(
            min=10,
            help="Number of training pairs that each seed draws from --vectors.",
            show_default="all",
        ),
    ] = None,
    width: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width of the inner layers of maps that --vectors trains; a quarter of it needs "
            "about a tenth of the arithmetic.",
            show_default="2048",
        ),
    ] = None,
) -> None:
    """Train and evaluate methods on the same splits; print a table, and which claims of papers
    hold."""
    if pairs is not None and not vectors:
        raise ConfigurationError(
            "--pairs is the number of training pairs of --vectors; also give --vectors FILE.npz"
        )
    if width is not None and not vectors:
        raise ConfigurationError(
            "--width is the width of the maps of --vectors; also give --vectors FILE.npz"
        )
    if vectors:
        others = {
            "--data": data, "--page": page, "--images": images, "--once": first_seed_methods,
            "--development": development or None,
        }  # fmt: skip
        if ignored := [name for name, value in others.items() if value is not None]:
            raise ConfigurationError(
                f"--vectors compares maps on stored vectors and trains no image model; leave out "
                f"{ignored[0]}"
            )
        _compare_vectors(vectors, out, seeds, methods, pairs, width)
        return
    if page:
        for document in page:
            for file in rewrite_tables(document):
                print(f"{document}: wrote the tables of {file}")
        return
    if data is None:
        raise ConfigurationError(
            f"expected --data: {', '.join(PRESETS)} or a folder of class folders. A whole "
            "comparison takes hours; begin with: "
            "python training/compare.py --data digits --seeds 1 --methods core"
        )
    folder = Path(data)
    if data != DIGITS.name and folder.is_dir():
        preset, images = folder_preset(len(list_images(folder).class_names)), folder
    else:
        preset = preset_named(data)
    if development:
        preset = development_preset(preset)
    names = methods.split(",") if methods else None
    once = first_seed_methods.split(",") if first_seed_methods else ()
    command = _command(preset, seeds, methods, first_seed_methods)
    used_seeds = comparison_seeds(preset, seeds)
    if preset.published_set is not None and preset.published_set.protocol_folders:
        planned = train_and_measure(
            preset, images, out, used_seeds, names, jobs, first_seed_names=once, cluster=ray
        )
        rows = summarise_by_protocols(planned)
        print(write_protocols(out, preset.title, rows, command, describe_machine()))
        return
    results = compare(
        preset, images, out, used_seeds, names, jobs,
        first_seed_names=once, command=command, cluster=ray,
    )  # fmt: skip
    _write(out, preset, results)


def _compare_vectors(
    files: Sequence[Path],
    out: Path,
    seeds: int,
    methods: str | None,
    pairs: int | None,
    width: int | None,
) -> None:
    words = ["python training/compare.py", *(f"--vectors {file.name}" for file in files)]
    words += [f"--seeds {seeds}"] + ([f"--methods {methods}"] if methods else [])
    words += [f"--pairs {pairs}"] if pairs else []
    words += [f"--width {width}"] if width else []
    results = compare_vectors(
        read_vectors(files),
        names=methods.split(",") if methods else None,
        pair_count=pairs,
        seed_count=seeds,
        command=" ".join(words),
        machine=describe_machine(),
        registry=None if width is None else list_rivals(inner_dim=width),
    )
    write_bench(out, files[0].stem, results)
    print(bench_page(results))


def _write(out: Path, preset: Preset, results: Results) -> None:
    text = results_page(results)
    write_results(out / f"{preset.title}.json", results)
    write_file(out / f"{preset.title}.md", text.encode(), 0o644)
    drawing = draw_costs(cost_points(results), f"Quality and cost on {preset.title}")
    write_file(out / f"{preset.title}.svg", drawing, 0o644)
    print(text)


def _command(
    preset: Preset, seeds: int, methods: str | None, first_seed_methods: str | None
) -> str:
    """Return the command line without paths of this machine."""
    named = preset.name if preset.name in PRESETS else "FOLDER"
    words = ["python training/compare.py", f"--data {named} --seeds {seeds}"]
    words += [f"--methods {methods}"] if methods else []
    words += [f"--once {first_seed_methods}"] if first_seed_methods else []
    words += ["--images FOLDER"] if preset.test_share is None else []
    words += ["--development"] if preset.is_development else []
    return " ".join(words)


def compare(
    preset: Preset,
    images: Path | None,
    out: Path,
    seeds: Sequence[int],
    names: Sequence[str] | None,
    job_count: int,
    changes: Mapping[str, Values] | None = None,
    first_seed_names: Sequence[str] = (),
    command: str = "compare()",
    cluster: str | None = None,
) -> Results:
    """Train and measure groups and methods; finished work below OUT/TITLE is used again.

    Links to the images, runs, features and cells are written below OUT/TITLE; another comparison
    there is locked out. Progress and times go to stderr. The results themselves are only returned.
    An interrupted call is resumed by the same call.

    Args:
        preset: the comparison.
        images: the folder of images; None: the preset makes its own (digits).
        out: the folder of the comparisons.
        seeds: the seeds, at least one. With one seed, no claim is decided.
        names: groups and methods; None or none: the preset's own.
        job_count: the number of processes; with 1 everything runs in this process, on one thread.
            It is ignored with a cluster.
        changes: keys that replace those of the preset's configurations, by kind; None: none.
        first_seed_names: more groups and methods, only for the first seed.
        command: the command line to record.
        cluster: the address of a Ray cluster, instead of processes.

    Raises:
        BusyError: another comparison works in OUT/TITLE; it is not waited for.
        ConfigurationError: a name is unknown, images are missing, OUT/TITLE belongs to other
            images, or Ray is not installed.
        InvalidInputError: there are too few classes, a class is empty, or an image cannot be
            decoded.
        NotFoundError: the images lack the folder train or test, or pretrained weights do not exist.
        VerificationError: a checkpoint of an earlier call is damaged.
        DivergedError: a training diverged.
        UnavailableError: no Ray cluster answers, or pretrained weights cannot be downloaded.
        NobackfillError: a process was killed.
        CannotWriteError: the disk cannot be written; some writes raise OSError. PermissionError:
            this user may not list a folder of images.
        ValueError: a row's mAP is 0 where a relative figure is computed, or no tested image shares
            its class with another one.
        ValueError, RuntimeError: an upgrade is solved from vectors that are not finite.
        IndexError: there is no seed.
    """
    planned = train_and_measure(
        preset, images, out, seeds, names, job_count, changes, first_seed_names, cluster
    )
    # Costs of the first place; they are equal for all seeds and splits.
    cost_of, rows = measure_costs(planned[0][1]), _collect(planned)
    provenance = Provenance(
        command=command, machine=describe_machine(), configured=digest_of_rows(preset, rows)
    )
    return summarise(preset.title, preset.metric, seeds, provenance, rows, CLAIMS, cost_of)


def summarise_by_protocols(planned: Planned) -> dict[str, ProtocolRow]:
    """Summarise rows that the published test protocols of their data set measured.

    There are no claims, costs and splits.

    Args:
        planned: measured rows of a comparison whose published set has protocols.

    Raises:
        AssertionError: the cells of a row are missing or cannot be read.
        KeyError: as in `summarise_protocols`.
    """
    rows: dict[str, MeasuredRow] = {}
    for place, described in planned:
        for row in described:
            cells = read_cells(cells_path(place, row))
            assert cells is not None
            rows.setdefault(row.name, MeasuredRow(row, [])).cells_by_seed.append(cells)
    return summarise_protocols(rows)


def train_and_measure(
    preset: Preset,
    images: Path | None,
    out: Path,
    seeds: Sequence[int],
    names: Sequence[str] | None,
    job_count: int,
    changes: Mapping[str, Values] | None = None,
    first_seed_names: Sequence[str] = (),
    cluster: str | None = None,
) -> Planned:
    """Train and measure all rows, and return them by place.

    Effects are those of `compare`. Without seeds the result is empty.

    Args:
        preset, images, out, seeds, names, job_count, changes, first_seed_names, cluster: as in
            `compare`.

    Raises:
        NobackfillError, ValueError, RuntimeError, OSError: as in `compare`; NotFoundError also if
            the folder of images has another layout.
    """
    if cluster is not None:
        # Nodes run in another working directory.
        out, images = out.resolve(), images and images.resolve()
    root = out / preset.title
    with _output_lock(root):
        preset, source = _source(preset, images, root)
        planned = []
        for seed in seeds:
            for split in preset.splits:
                place = _place(preset, split, seed, root, source, changes or {})
                own = (
                    preset.row_groups
                    if split.name == MAIN
                    else preset.row_groups_for_unseen_classes
                )
                more = first_seed_names if seed == seeds[0] else ()
                planned.append((place, list_rows(place, (*(names or own), *more))))
        started = time.monotonic()
        run_tasks(planned, job_count, cluster)
        seconds = time.monotonic() - started
        print(f"compare.py: trained and measured in {seconds:.0f} s", file=sys.stderr)
    return planned


@contextmanager
def _output_lock(root: Path) -> Iterator[None]:
    """Lock the folder: two comparisons would overwrite each other's runs."""
    with ExitStack() as stack:
        try:
            stack.enter_context(lock_file(root / "lock"))
        except BusyError as error:
            raise BusyError(
                f"another compare.py writes to {root}; wait until it ends, or choose another --out"
            ) from error
        yield


def _source(preset: Preset, images: Path | None, root: Path) -> tuple[Preset, Path]:
    """Return the folder of the images, and the preset with as many classes as it has."""
    if preset.name == DIGITS.name:
        write_digits(root / "digits")
        return preset, root / "digits"
    data = preset.published_set
    if images is None:
        raise ConfigurationError(
            f"--data {preset.name} needs --images FOLDER with "
            + (
                "the folders train and test; write it with: "
                "python -m nobackfill.training.data.cifar100 FOLDER"
                if data is None
                else data.expected_layout
            )
        )
    if data is not None:
        parts = read_published(data, images)
        if not data.requires_all_classes:
            preset = scale_preset(preset, len(parts[TRAIN].class_names))
        classes = max(split.new_class_count for split in preset.splits)
        return preset, link_published(data, images, parts, classes, root)
    classes = max(split.new_class_count for split in preset.splits)
    check_classes(images if preset.test_share is not None else images / "train", classes)
    require_same_images(images, preset.test_share, root)
    return preset, images


def _place(
    preset: Preset,
    split: Split,
    seed: int,
    root: Path,
    source: Path,
    changes: Mapping[str, Values],
) -> ComparisonPlace:
    images = prepare_seed_images(preset, source, root, seed)
    return ComparisonPlace(preset, split, seed, images, root / f"seed-{seed}" / split.name, changes)


def _collect(planned: Planned) -> dict[str, dict[str, MeasuredRow]]:
    """Return the measured rows by split and name, in the order of the first seed."""
    splits: dict[str, dict[str, MeasuredRow]] = {}
    for place, rows in planned:
        # Rows share old models and tests, so read each folder once.
        masks: dict[tuple[Path, str], NDArray[np.bool_]] = {}
        for row in rows:
            cells = read_cells(cells_path(place, row))
            assert cells is not None
            ends = (row.old_run.folder, row.test_folder)
            if ends not in masks:
                masks[ends] = is_class_known_to_old(row, row_images(place, row))
            split = splits.setdefault(place.split.name, {})
            split.setdefault(row.name, MeasuredRow(row, [])).cells_by_seed.append(
                add_class_ranges(cells, masks[ends])
            )
    return splits


app = command_app("compare.py", main, _EPILOG)

if __name__ == "__main__":
    app()
