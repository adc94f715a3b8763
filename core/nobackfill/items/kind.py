"""What an item is to a model."""

from typing import Literal

Kind = Literal["text", "image"]
