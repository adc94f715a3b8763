"""Old and new model of different architecture: ResNet to transformers, MobileNet to ResNet.

The networks are those for small images (`nobackfill.training.networks.backbones`), so that a
comparison on a processor can train them. DMU's appendix B goes from a CNN to a transformer.
"""

from collections.abc import Mapping
from typing import Any

from nobackfill.training.comparison.names import Name, within
from nobackfill.training.comparison.recipe import Place, Run
from nobackfill.training.comparison.rows import Row, Shared

# Backbones of the old and of the new model, by what the rows' names begin with.
PAIRS: Mapping[str, tuple[str, str]] = {
    "resnet_to_vit": ("small_resnet", "small_vit"),
    "resnet_to_swin": ("small_resnet", "small_swin"),
    "mobilenet_to_resnet": ("small_mobilenet", "small_resnet"),
}
_TRANSFORMERS = ("small_vit", "small_swin")


def architectures(shared: Shared) -> list[Row]:
    """Each pair on its own, by the strongest compatible methods, by rivals and by ours."""
    return [row for pair in PAIRS for row in _pair(shared, pair)]


def _pair(shared: Shared, pair: str) -> list[Row]:
    place, split, simclr = shared.place, shared.split, shared.side("simclr")
    before, after = PAIRS[pair]
    old = place.embedder(f"old-{before}", classes=split.old, role="old", **_settings(place, before))

    def new(name: str, **values: Any) -> Run:
        return place.embedder(
            name, classes=split.new, role="new", **_settings(place, after), **values
        )

    def compatible(method: str, **options: Any) -> Run:
        return new(f"{pair}-{method}", old=old, method=method, options=options)

    own = new(f"new-{after}")

    def carried(name: str, method: str) -> Row:
        run = place.upgrade(
            f"upgrade-{pair}-{name}", old, own, classes=split.new, side=simclr, method=method
        )
        return Row(within(pair, name), old, own, (run,), simclr)

    dmu = compatible("dmu", hidden_dim=place.preset.dmu_hidden_dim)
    return [
        Row(within(pair, Name.INDEPENDENT), old, own),
        Row(within(pair, Name.BCT_SYS), old, compatible("bct_sys")),
        Row(within(pair, Name.DMU), old, dmu, (dmu,)),
        carried(Name.AFFINE_SIMCLR, "affine"),
        carried(Name.FCT_SIMCLR, "fct"),
        carried(Name.RESIDUAL_SIMCLR, "residual"),
    ]


def _settings(place: Place, backbone: str) -> dict[str, Any]:
    """Transformers learn by Adam and in twice the epochs; by the presets' settings they end below
    the old ResNet. Chosen on a development seed of digits.
    """
    if backbone not in _TRANSFORMERS:
        return {"backbone": backbone}
    values = {**place.preset.embedder, **place.changes.get("embedder", {})}
    epochs, warmup = values["epochs"], values.get("warmup_epochs", 0.0)
    assert isinstance(epochs, int) and isinstance(warmup, int | float)
    return {
        "backbone": backbone,
        "optimizer": "adam",
        "lr": 0.003,
        "weight_decay": 0.0,
        "epochs": 2 * epochs,
        "warmup_epochs": 2 * warmup,
    }
