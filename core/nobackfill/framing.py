"""Place a picture of any aspect ratio in the pixels that a model reads."""

from typing import Literal, NamedTuple

# stretch: scale each side by itself. crop: scale the shorter side to `shortest` pixels, then cut
# out the centre. pad: scale until the picture fits, then centre it on black.
Fit = Literal["stretch", "crop", "pad"]
# The resampling filter; always over all source pixels (antialiased).
Interpolation = Literal["bilinear", "bicubic", "lanczos"]
# Rounding when an odd number of pixels is cut from two sides: as torchvision, or down, as
# transformers.
MarginRounding = Literal["nearest", "down"]

Box = tuple[float, float, float, float]


class Frame(NamedTuple):
    """The size in pixels that a model reads, and how a picture is resized to it.

    Attributes:
        height: Rows of the model's input.
        width: Columns of the model's input.
        fit: stretch, crop or pad; `crop` without `shortest` stretches.
        shortest: Length of the shorter side before a crop, in pixels; other fits ignore it.
        interpolation: The resampling filter.
        margin: How a crop rounds the margin that it cuts off.
    """

    height: int
    width: int
    fit: Fit = "stretch"
    shortest: int | None = None
    interpolation: Interpolation = "bilinear"
    margin: MarginRounding = "nearest"

    def transpose(self) -> "Frame":
        """Return the frame for a picture that is rotated by 90 degrees after it was resized.

        The other fields stay.
        """
        return self._replace(height=self.width, width=self.height)

    def place_picture(
        self, width: int, height: int
    ) -> tuple[Box, tuple[int, int], tuple[int, int]]:
        """Compute which part of a picture is shown, its size in the frame, and its position there.

        No intermediate picture is larger than the frame: a picture may be a line of millions of
        pixels. A crop takes the same pixels as torchvision's Resize and CenterCrop, which round the
        longer side down, and the margin as `margin` says. A side that is shorter than the frame
        after scaling to `shortest` is stretched to the frame.

        Args:
            width: Columns of the picture, at least 1.
            height: Rows of the picture, at least 1.

        Returns:
            The visible part of the picture (left, top, right, bottom), its size in the frame
            (width, height), and its upper left corner there (left, top), all in pixels.

        Raises:
            ZeroDivisionError: A side of the picture is 0, except with stretch.
        """
        picture: Box = (0, 0, width, height)
        if self.fit == "crop" and self.shortest is not None:
            shorter = min(width, height)
            scaled = self.shortest * width // shorter, self.shortest * height // shorter
            left, right = _centre(width, scaled[0], self.width, self.margin)
            top, bottom = _centre(height, scaled[1], self.height, self.margin)
            return (left, top, right, bottom), (self.width, self.height), (0, 0)
        if self.fit == "pad":
            scale = min(self.width / width, self.height / height)
            size = max(1, round(width * scale)), max(1, round(height * scale))
            return picture, size, ((self.width - size[0]) // 2, (self.height - size[1]) // 2)
        return picture, (self.width, self.height), (0, 0)


def _centre(side: int, scaled: int, size: int, margin: MarginRounding) -> tuple[float, float]:
    """Return where the central pixels of the scaled side begin and end on the source's side."""
    scaled = max(size, scaled)
    half = (scaled - size) / 2
    start = round(half) if margin == "nearest" else int(half)
    return start * side / scaled, min(side, (start + size) * side / scaled)
