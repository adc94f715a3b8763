"""How a picture of any aspect becomes the pixels that a model reads."""

from typing import Literal, NamedTuple

# stretch: both sides scaled by themselves. crop: the shortest side to `shortest` pixels, then the
# middle cut out. pad: scaled until it fits, in the middle of black.
Fit = Literal["stretch", "crop", "pad"]
# What a resized pixel is made of, always over all that it covers (antialiased).
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
# How an odd number of pixels is halved that is cut off both sides: as torchvision does, or down, as
# transformers does.
Margin = Literal["nearest", "down"]

Box = tuple[float, float, float, float]


class Frame(NamedTuple):
    """`height` x `width` pixels, and how a picture is brought to them."""

    height: int
    width: int
    fit: Fit = "stretch"
    shortest: int | None = None
    interpolation: Interpolation = "bilinear"
    margin: Margin = "nearest"

    def sideways(self) -> "Frame":
        """What a picture is brought to that is turned by 90 degrees afterwards."""
        return self._replace(height=self.width, width=self.height)

    def placed(self, width: int, height: int) -> tuple[Box, tuple[int, int], tuple[int, int]]:
        """Of a picture of `width` x `height` pixels: the part that is shown (left, top, right,
        bottom), its size in the frame, and where that begins: (width, height), (left, top).

        Whatever is scaled, nothing larger than the frame is made: a picture may be a line of
        millions of pixels. What is cut out are the very pixels of torchvision's Resize and
        CenterCrop, which round the longer side down and the margin as `margin` says.
        """
        whole: Box = (0, 0, width, height)
        if self.fit == "crop" and self.shortest is not None:
            least = min(width, height)
            scaled = self.shortest * width // least, self.shortest * height // least
            left, right = _middle(width, scaled[0], self.width, self.margin)
            top, bottom = _middle(height, scaled[1], self.height, self.margin)
            return (left, top, right, bottom), (self.width, self.height), (0, 0)
        if self.fit == "pad":
            scale = min(self.width / width, self.height / height)
            size = max(1, round(width * scale)), max(1, round(height * scale))
            return whole, size, ((self.width - size[0]) // 2, (self.height - size[1]) // 2)
        return whole, (self.width, self.height), (0, 0)


def _middle(side: int, scaled: int, wanted: int, margin: Margin) -> tuple[float, float]:
    """Where on a side the middle `wanted` pixels of what it is scaled to begin and end."""
    scaled = max(wanted, scaled)
    half = (scaled - wanted) / 2
    start = round(half) if margin == "nearest" else int(half)
    return start * side / scaled, min(side, (start + wanted) * side / scaled)
