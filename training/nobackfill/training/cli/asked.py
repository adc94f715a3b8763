"""What a release is measured with: images, texts, or images that are asked for by texts."""

from collections.abc import Mapping
from dataclasses import dataclass

from nobackfill.class_folders import Listing
from nobackfill.errors import ConfigurationError, few
from nobackfill.quality.listing import TextListing
from nobackfill.release.manifest import Manifest


@dataclass(frozen=True)
class Asked:
    """Of --eval and --eval-texts; `seed` splits what is listed into halves."""

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
