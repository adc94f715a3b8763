"""The steps of the life, each a public command or a gRPC call."""

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import data, gateway, serve, train
from demo.children import Children
from demo.device import Device
from demo.gateways import Gateways, Store
from demo.journal import Journal, Result
from demo.latency import latency_summary
from demo.ranking import Answers, compute_quality, measure_agreement
from demo.recipes import Recipes, choose_affordable
from demo.screen import Screen, format_duration

# Galleries of the gateway: the server's own, and one with the device's images, to compare with it.
SERVER, MIRROR = "photos", "device-mirror"
# Hits compared between device and server.
COMPARED = 5


@dataclass(frozen=True)
class Options:
    """What a run of the demo was asked for."""

    out: Path
    images: Path | None
    rollout: str
    store: Store
    seed: int
    image_size: int | None
    epochs: int | None
    batch_size: int | None
    images_per_class: int | None
    clients: int
    steady_seconds: float
    force: bool

    def as_kept(self) -> dict[str, Any]:
        """As the journal keeps them: a run goes on with the same options only."""
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(self).items()
            # Forcing a refused release goes on with the same run.
            if name not in {"out", "force"}
        }


class Life:
    """One life of an embedding. Steps are called in order, each of them once; a step that a killed
    run left half done is begun again."""

    def __init__(
        self, options: Options, children: Children, journal: Journal, screen: Screen
    ) -> None:
        out = options.out
        self.options = options
        self.children = children
        self.journal = journal
        self.screen = screen
        self.data = out / "data"
        self.model_repo = out / "model_repo"
        # Nothing but the last measurements may look in here.
        self.copies = out / "measuring-only"
        self.answers = out / "answers"
        self.runs = out / "runs"
        self.gateways = Gateways(children, out, options.store)
        self.device = Device(children, out / "device")

    def steps(self) -> list[tuple[str, str, Callable[[], Result]]]:
        """Name, title and work of each step."""
        return [
            ("data", "Cut the images into parts", self.cut_images),
            ("train_1", "Train release 1 on the first half of the classes", self.train_1),
            ("publish_1", "Publish release 1", lambda: self.publish(1)),
            ("server", "Start the gateway, put the server's images", self.fill_server),
            ("device", "Put the device's images into one SQLite file", self.fill_device),
            ("before", "Search both with the old model", lambda: self.measure("old-old")),
            ("train_2", "Train release 2 on all classes, and the upgrade", self.train_2),
            ("publish_2", "Publish release 2", lambda: self.publish(2)),
            ("forget", "Delete the images of both galleries", self.forget),
            ("swap", "Swap to release 2 under load", self.swap),
            ("sync", "Sync the device while it is searched", self.sync),
            ("after", "Search both with the new model", lambda: self.measure("new-upgraded")),
            ("bounds", "Measure a naive swap, and embedding all again", self.bounds),
            ("picture", "Draw the picture of the upgrade", self.picture),
        ]

    def recipes(self) -> Recipes:
        """How this life trains, once its images are cut."""
        options = self.options
        cut = self.journal["data"]
        return self._recipes(
            options.image_size or cut["image_size"], options.epochs or cut.get("epochs")
        )

    def _recipes(self, image_size: int, epochs: int | None) -> Recipes:
        options = self.options
        return Recipes(
            images=self.data / "train",
            runs=self.runs,
            image_size=image_size,
            epochs=epochs,
            batch_size=options.batch_size,
            seed=options.seed,
            compatible=options.rollout == "direct",
        )

    def queries(self) -> dict[str, Path]:
        return gateway.list_images(self.data / "queries")

    def cut_images(self) -> Result:
        options = self.options
        cut = data.prepare_images(
            self.data, options.images, seed=options.seed, limit=options.images_per_class
        )
        result = dataclasses.asdict(cut) | {"epochs": None}
        if options.images is not None:
            recipes = self._recipes(options.image_size or cut.image_size, options.epochs)
            sizes = cut.old_images, cut.new_images
            if options.image_size is None and options.epochs is None:
                recipes, seconds = choose_affordable(recipes, *sizes)
                result |= {"image_size": recipes.image_size, "epochs": recipes.epochs}
            else:
                seconds = recipes.seconds(*sizes)
            epochs = "the configured" if recipes.epochs is None else recipes.epochs
            self.screen.print_line(
                f"      {cut.new_images:,} images of {len(cut.new)} classes to train on. Training "
                f"takes about {format_duration(seconds)} with {recipes.image_size} pixels and "
                f"{epochs} epochs. Choose others with DEMO_ARGS='--image-size N --epochs N'."
            )
        return result

    def train_1(self) -> Result:
        cut = self.journal["data"]
        networks = self.recipes().networks(1, len(cut["old"]), cut["old_images"])
        train.train_all(self.children, self.screen, networks)
        return {}

    def train_2(self) -> Result:
        cut = self.journal["data"]
        networks = self.recipes().networks(2, len(cut["new"]), cut["new_images"])
        train.train_all(self.children, self.screen, networks)
        train.train_all(self.children, self.screen, [self.recipes().upgrade(cut["new_images"])])
        return {}

    def publish(self, release: int) -> Result:
        evaluation = self.data / "eval"
        train.publish_release(
            self.children, self.model_repo, release, self.runs, evaluation, self.options.force
        )
        return {}

    def fill_server(self) -> Result:
        with gateway.connect(self.gateways.address()) as connection:
            items = {}
            for name, part in ((SERVER, "server"), (MIRROR, "device")):
                folder = self.data / part
                bar = self.screen.bar(f"put {part} images", len(gateway.list_images(folder)))
                gateway.create_gallery(connection, name)
                items[name] = gateway.put_images(connection, name, folder, bar)
        return {"items": items[SERVER]}

    def fill_device(self) -> Result:
        source = f"grpc://{self.gateways.address()}"
        root = self.model_repo / "1.root.json"
        items = self.device.create(source, root, self.data / "device")
        return {"items": items, "ids": list(gateway.list_images(self.data / "device"))}

    def measure(self, name: str) -> Result:
        """What Search answers on the server and on the device, and whether the two agree."""
        server_ids = self.journal["server"]["items"]
        device_ids = self.journal["device"]["ids"]
        queries = self.queries()
        with gateway.connect(self.gateways.address()) as connection:
            on_server = gateway.search_images(connection, SERVER, queries, len(server_ids))
            on_mirror = gateway.search_images(connection, MIRROR, queries, len(device_ids))
        on_device = self.device.search(queries, len(device_ids))
        self._keep_answers(name, on_server)
        return {
            "server": compute_quality(on_server, server_ids),
            "device": compute_quality(on_device, device_ids),
            "agreement": measure_agreement(on_device, on_mirror, COMPARED),
        }

    def forget(self) -> Result:
        """The galleries' images go; from now on nobody can embed them again."""
        self.copies.mkdir(exist_ok=True)
        for part in ("server", "device"):
            if (self.data / part).exists():
                (self.data / part).rename(self.copies / part)
        return {}

    def swap(self) -> Result:
        options = self.options
        with gateway.connect(self.gateways.address()) as connection:
            if gateway.wait_for_settled_release(connection) == 2:
                connection.rollback(confirm=True)
            with serve.run_load(
                self.gateways.address(), SERVER, self.data / "queries", options.clients
            ) as met:
                time.sleep(options.steady_seconds)
                activation = self.gateways.activate(2, options.rollout)
                time.sleep(options.steady_seconds)
        window = activation.window
        return {
            **latency_summary(met.answers, window),
            "failures": dict(Counter(met.failures)),
            "swap_seconds": round(window.end - window.start, 2),
            "upgrade_items_per_second": round(activation.items / activation.upgrade_seconds, 1),
            "phases": activation.phases,
            "gateways": self.gateways.count,
            "killed": self.gateways.killed,
        }

    def sync(self) -> Result:
        source = f"grpc://{self.gateways.address()}"
        seconds, answered, failed = self.device.sync(source, next(iter(self.queries().values())))
        status = self.device.status()
        return {
            "sync_seconds": round(seconds, 2),
            "searches": answered,
            "failed": failed,
            "release": status["release"],
        }

    def bounds(self) -> Result:
        """The cells that need the images: new/old and new/new, from copies kept for this alone."""
        report = self.options.out / "answers" / "bounds.json"
        self.children.run(
            "evaluate",
            [
                *(sys.executable, "training/evaluate.py", "--model-repo", self.model_repo),
                *("--queries", self.data / "queries", "--gallery", self.copies / "server"),
                *("--cells", "2/1,2/2", "--neighbours", "5", "--json", report),
            ],
        )
        measured = json.loads(report.read_text(encoding="utf-8"))
        self._keep_answers("new-old", measured["neighbours"]["2/1"])
        self._keep_answers("new-new", measured["neighbours"]["2/2"])
        return {
            name: {key: round(100 * measured["cells"][cell][key], 2) for key in KEYS}
            for name, cell in (("new/old", "2/1"), ("new/new", "2/2"))
        }

    def picture(self) -> Result:
        self.children.run(
            "report",
            [
                *(sys.executable, "-m", "nobackfill.report", "--model-repo", self.model_repo),
                *("--release", "2", "--images", self.copies / "server"),
                *("-o", self.options.out / "upgrade.html"),
            ],
        )
        return {}

    def _keep_answers(self, name: str, answers: Answers) -> None:
        self.answers.mkdir(exist_ok=True)
        text = json.dumps({query: list(hits) for query, hits in answers.items()})
        (self.answers / f"{name}.json").write_text(text, encoding="utf-8")


KEYS = ("cmc1", "cmc5", "map")
