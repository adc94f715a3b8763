"""A release in preparation: its ONNX files in a local folder, and the parts of its manifest.

Parts are added one by one (embedder, side encoder, upgrades, probes). gate.py then measures the
files, and export.py publishes. Probe pictures are synthetic: a release contains no real image.
"""

import datetime
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.class_folders import Images
from nobackfill.digests import side_space_id
from nobackfill.errors import ConfigurationError
from nobackfill.release.manifest import (
    GateVerdict,
    Manifest,
    Probes,
    PublishedEmbedder,
    PublishedFile,
    PublishedSideEncoder,
    QueryAdapter,
    TextEncoder,
    Upgrade,
    embedder_path,
    lowest_manifest_format,
    release_space_id,
    side_encoder_path,
    upgrade_int8_path,
    upgrade_path,
)
from nobackfill.release.publishing.draft import Draft, describe_file
from nobackfill.training.export.onnx_export import export_onnx, quantise
from nobackfill.training.networks.embedder import ImageEncoder
from nobackfill.training.networks.transform import UpgradeNetwork as UpgradeModule

_PROBES = 8


def probe_images(height: int, width: int) -> Images:
    """Make eight smooth synthetic pictures, uint8 [8,height,width,3], the same on every call.

    Height and width are at least 1.
    """
    rng = np.random.default_rng(2026)
    coarse = rng.random((_PROBES, 3, 4, 4), dtype=np.float32)
    smooth = F.interpolate(
        torch.from_numpy(coarse), (height, width), mode="bicubic", align_corners=False
    )
    images: Images = (smooth.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1).numpy()
    return np.ascontiguousarray(images)


Recipe = dict[str, str | int | float | bool | None]


@dataclass
class ReleaseDraft:
    """A release in preparation: its files, and the parts of its manifest.

    Attributes:
        number: the number of the release.
        folder: where its files are written.
        older_manifests: the published older releases by number.
        publication_folder: the publication folder, with the files of `older_manifests`.
        method: how the embedder was trained.
        recipe: what the manifest says about the trainings.
        files: local files by the path under which they are published.
        embedder, text_encoder, side_encoder: entries of the models; None until one is added.
        upgrades: entries of the upgrades.
        adapters: entries of the query adapters.
        withdrawn_releases: numbers of `older_manifests` that were withdrawn.
        searches_directly: numbers of `older_manifests` whose vectors the release's queries can
            search.
    """

    number: int
    folder: Path
    older_manifests: Mapping[int, Manifest]
    publication_folder: Path
    method: str = "independent"
    recipe: Recipe = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    embedder: PublishedEmbedder | None = None
    text_encoder: TextEncoder | None = None
    side_encoder: PublishedSideEncoder | None = None
    upgrades: list[Upgrade] = field(default_factory=list)
    adapters: list[QueryAdapter] = field(default_factory=list)
    withdrawn_releases: Collection[int] = ()
    searches_directly: list[int] = field(default_factory=list)

    def all_files(self) -> dict[str, Path]:
        """Return local files of this release and of the published ones, by published path.

        If both have a path, this release's file counts. The files need not exist.
        """
        old = {
            file.path: self.publication_folder / file.path
            for manifest in self.older_manifests.values()
            for file in manifest.files()
        }
        return {**old, **self.files}

    def add_embedder(self, encoder: ImageEncoder) -> None:
        """Export phi as ONNX, and set `embedder`. The encoder is moved to the CPU and to eval mode.

        The metric is cosine if the encoder's vectors have length 1, else squared L2. An embedder
        that was added before is replaced. Its ONNX file stays if the comparison fails, and
        `embedder` stays as it was.

        Raises:
            VerificationError: onnxruntime's output differs from torch's by more than PARITY.
            OSError: the file cannot be written.
            RuntimeError: torch cannot export the network.
        """
        path = self.add_file(embedder_path(self.number))
        probes = {"image": torch.from_numpy(probe_images(encoder.image_size, encoder.image_size))}
        export_onnx(encoder, probes, ("embedding",), path)
        self.embedder = PublishedEmbedder(
            file=self.published_file(embedder_path(self.number)),
            height=encoder.image_size,
            width=encoder.image_size,
            dim=encoder.dim,
            metric="cosine" if encoder.unit_norm else "squared_l2",
            unit=encoder.unit_norm,
        )

    def add_side_encoder(self, encoder: ImageEncoder) -> None:
        """Export psi as ONNX, and set `side_encoder`. Add the embedder before.

        The encoder is moved to the CPU and to eval mode. An encoder that was added before is
        replaced. Without an embedder it raises AssertionError.

        Raises:
            ConfigurationError: its image size differs from phi's.
            VerificationError: onnxruntime's output differs from torch's by more than PARITY.
            OSError: the file cannot be written.
            RuntimeError: torch cannot export the network.
        """
        assert self.embedder is not None
        self._check_size(encoder.image_size, "the side encoder")
        path = self.add_file(side_encoder_path(self.number))
        probes = {"image": torch.from_numpy(probe_images(encoder.image_size, encoder.image_size))}
        export_onnx(encoder, probes, ("side",), path)
        self.side_encoder = PublishedSideEncoder(
            file=self.published_file(side_encoder_path(self.number)),
            dim=encoder.dim,
            origin_release=self.number,
        )

    def keep_side_encoder(self) -> None:
        """Use psi of the newest published release, so that its side-information stays valid.

        It is the newest one even if it was withdrawn. Add the embedder before. No file is copied:
        the manifest names the older release's. Without an embedder it raises AssertionError.

        Raises:
            ConfigurationError: no release is published, the newest has no psi, or one for another
                image size.
            NoEncoderError: the newest release embeds no images.
        """
        newest = self.older_manifests[max(self.older_manifests)] if self.older_manifests else None
        if newest is None or newest.side_encoder is None:
            raise ConfigurationError(
                "--keep-side-encoder: there is no published release, or the newest one has no "
                "side-information encoder; give --side-encoder RUN"
            )
        self._check_size(newest.frame.height, f"release {newest.release}'s side encoder")
        self.side_encoder = newest.side_encoder

    def add_upgrade(
        self,
        module: UpgradeModule,
        source: Manifest,
        examples: tuple[Tensor, Tensor | None],
        *,
        method: str,
        keeps_side_information: bool,
    ) -> None:
        """Export an upgrade from `source`, and its int8 twin.

        The module is moved to the CPU and to eval mode. A second upgrade from the same release gets
        a second entry, but the same files. After an error no entry is added, but files may stay.

        Args:
            module: the upgrade's network.
            source: the published release that it upgrades from.
            examples: embeddings [n,dim], n at least 1, and side-information [n,side_dim], None
                without any, of `source`; for tracing and for the comparison with onnxruntime.
            method: the name of the training method.
            keeps_side_information: side-information stays valid unchanged; ignored if the upgrade
                computes new.

        Raises:
            ConfigurationError: it reads side-information that `source` does not have.
            VerificationError: onnxruntime's output differs from torch's by more than PARITY.
            OSError: a file cannot be written.
            RuntimeError: torch cannot export the network.
        """
        graph = UpgradeGraph(module)
        inputs = {"embedding": examples[0]}
        if module.reads_side:
            if examples[1] is None:
                raise ConfigurationError(
                    f"the upgrade from release {source.release} reads side-information, but "
                    "galleries of that release store none; train the upgrade again with "
                    "reads_side: false"
                )
            inputs["side"] = examples[1]
        file = self.add_file(upgrade_path(source.release, self.number))
        export_onnx(graph, inputs, graph.outputs, file)
        self.list_upgrade(
            source,
            method=method,
            side="maps"
            if module.g is not None
            else "carries"
            if keeps_side_information
            else "drops",
            side_dim=inputs["side"].shape[1] if module.reads_side else 0,
            predicts_uncertainty=module.log_variance is not None,
        )

    def list_upgrade(
        self,
        source: Manifest,
        *,
        method: str,
        side: Literal["maps", "carries", "drops"],
        side_dim: int = 0,
        predicts_uncertainty: bool = False,
    ) -> None:
        """Write the int8 twin of an upgrade whose file was added, and list the upgrade.

        Args:
            source: the published release that it upgrades from.
            method: the name of the training method.
            side: what happens to side-information.
            side_dim: the dimension of the side-information that it reads; 0: none.
            predicts_uncertainty: it has this output.

        Raises:
            KeyError: its file was not added.
            OSError: its file does not exist, or the int8 file cannot be written.
            DecodeError: its file is no ONNX; it is protobuf's.
        """
        path = upgrade_path(source.release, self.number)
        int8 = upgrade_int8_path(source.release, self.number)
        quantise(self.files[path], self.add_file(int8))
        self.upgrades.append(
            Upgrade(
                from_release=source.release,
                from_space=source.space,
                from_dim=source.embedder.dim,
                from_side_space=source.side_space if side_dim else None,
                from_side_dim=side_dim,
                method=method,
                file=self.published_file(path),
                int8_file=self.published_file(int8),
                side=side,
                predicts_uncertainty=predicts_uncertainty,
            )
        )

    @property
    def stored_side_stays_valid(self) -> bool:
        """Whether the release has the side-information encoder of an older one."""
        return self.side_encoder is not None and self.side_encoder.origin_release != self.number

    def manifest(self, probes: Probes) -> Manifest:
        """Return the manifest of the parts so far, unmeasured and with the present time.

        Upgrades are sorted by their source and adapters by their target, and `searches_directly`
        names each release once.
        Without an embedder it raises AssertionError.

        Args:
            probes: the entry of the golden probes.

        Raises:
            ValidationError: the parts contradict each other; it is pydantic's.
            KeyError: `searches_directly` names a release that is not published.
        """
        assert self.embedder is not None
        return Manifest(
            format=lowest_manifest_format(
                self.embedder, self.text_encoder, has_query_adapter=bool(self.adapters)
            ),
            release=self.number,
            space=release_space_id(self.embedder, self.text_encoder),
            embedder=self.embedder,
            text_encoder=self.text_encoder,
            side_space=side_space_id(self.side_encoder.file.sha256) if self.side_encoder else None,
            side_encoder=self.side_encoder,
            upgrades=tuple(sorted(self.upgrades, key=lambda upgrade: upgrade.from_release)),
            searches_directly=tuple(
                self.older_manifests[number].space for number in sorted(set(self.searches_directly))
            ),
            adapters=tuple(sorted(self.adapters, key=lambda adapter: adapter.to_release)),
            gate=GateVerdict(verdict="not_measured"),
            probes=probes,
            method=self.method,
            recipe=self.recipe,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        )

    def finish(self, manifest: Manifest) -> Draft:
        """Return what to publish: `manifest`, and those of this release's files that it names.

        Files that the manifest does not name, such as those of a dropped int8 upgrade, are left
        out. No file is read.
        """
        named = {file.path for file in manifest.files()}
        return Draft(manifest, {path: file for path, file in self.files.items() if path in named})

    def _check_size(self, size: int, what: str) -> None:
        assert self.embedder is not None
        if size != self.embedder.height:
            raise ConfigurationError(
                f"{what} reads images of {size} pixels, but the embedder reads "
                f"{self.embedder.height} pixels; both read the same image, so train them with the "
                "same image_size"
            )

    def add_file(self, path: str) -> Path:
        """Return the local path for a file that is published as `path`, and record it in `files`.

        Its folder is created, the file is not. A path that was recorded before keeps its place.

        Raises:
            OSError: its folder cannot be created.
        """
        local = self.folder / path
        local.parent.mkdir(parents=True, exist_ok=True)
        self.files[path] = local
        return local

    def published_file(self, path: str) -> PublishedFile:
        """Return the manifest's entry of a written file: path, SHA-256 and length.

        The file is read whole. The entry is not stored in the release.

        Raises:
            KeyError: `add_file` was not called for this path.
            OSError: the file cannot be read.
            ValidationError: the file is empty, or the path is not plain; it is pydantic's.
        """
        return describe_file(path, self.files[path])


class UpgradeGraph(nn.Module):
    """The published graph of an upgrade: it returns the variance, and only outputs that exist.

    `outputs` names them in order: upgraded, upgraded_side, uncertainty.
    """

    def __init__(self, upgrade: UpgradeModule) -> None:
        super().__init__()
        self.upgrade = upgrade
        self.outputs: tuple[str, ...] = ("upgraded",)
        self.outputs += ("upgraded_side",) if upgrade.g is not None else ()
        self.outputs += ("uncertainty",) if upgrade.log_variance is not None else ()

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return the outputs of `outputs` for embeddings [n,dim] and side [n,side_dim].

        The variance is the exponential of the network's log-variance, so the output `uncertainty`
        is above 0. `side` may be None only if the upgrade does not read it, else AssertionError.
        """
        result = self.upgrade(embedding, side)
        variance = None if result.log_variance is None else result.log_variance.exp()
        return tuple(
            output for output in (result.embedding, result.side, variance) if output is not None
        )
