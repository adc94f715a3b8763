"""Models of torchvision as they were published: `torchvision:NAME/WEIGHTS`, weights by the names
that `train.py --weights` takes, without their classifier."""

from torch import nn

from nobackfill.errors import ConfigurationError
from nobackfill.release.publishing.preprocessing import Preprocessing
from nobackfill.training.networks.backbones import AUXILIARY, linear_layers, replace_layer
from nobackfill.training.networks.public_models import PublicModel, unknown
from nobackfill.training.networks.weights import of_torchvision, read_weights

TORCHVISION = "torchvision:"


def open_torchvision(name: str) -> PublicModel:
    """The model, its weights downloaded and compared with their digest; what its classifier read is
    the embedding.

    Raises ConfigurationError for unknown names (naming near ones) and for models that have no such
    layer, and what read_weights raises.
    """
    import torchvision

    architecture, _, tag = name.removeprefix(TORCHVISION).partition("/")
    known = torchvision.models.list_models(module=torchvision.models)
    if architecture not in known:
        raise unknown(name, "torchvision", architecture, known)
    pixels = _pixels(of_torchvision(tag, architecture).transforms())
    plain = architecture not in AUXILIARY
    network = torchvision.models.get_model(architecture, weights=None) if plain else nn.Module()
    linear = linear_layers(network)
    if not linear:
        raise ConfigurationError(
            f"{name}: expected a model whose last layer reads the embedding of normalised pixels; "
            "take timm's, timm:NAME.TAG"
        )
    try:
        network.load_state_dict(dict(read_weights(tag, architecture).tensors))
    except RuntimeError as error:
        told = str(error).partition("\n")[0]
        raise ConfigurationError(
            f"{name}: its weights have other names than the model ({told}); take timm's, "
            "timm:NAME.TAG"
        ) from error
    path, last = linear[-1]
    replace_layer(network, path, nn.Identity())
    return PublicModel(name, network.eval(), last.in_features, pixels)


def _pixels(transforms: object) -> Preprocessing:
    """Of torchvision's preset: the shortest side, then the middle."""
    from torchvision.transforms._presets import ImageClassification

    assert isinstance(transforms, ImageClassification)
    (side,), (shortest,) = transforms.crop_size, transforms.resize_size
    return Preprocessing(
        size=(side, side), fit="crop", shortest=shortest,
        interpolation=transforms.interpolation.value,
        mean=tuple(transforms.mean), std=tuple(transforms.std),
    )  # fmt: skip
