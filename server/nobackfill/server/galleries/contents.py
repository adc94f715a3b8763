"""What is put: items with an image, a text, or vectors that were made elsewhere."""

import hashlib
from dataclasses import dataclass

from nobackfill.gallery.spec import Metadata


@dataclass(frozen=True)
class Bare:
    """Vectors made elsewhere: bytes of float32 values with the ids of their spaces."""

    space: str
    embedding: bytes
    side_space: str | None
    side: bytes | None


@dataclass(frozen=True)
class Put:
    """An item to store: an encoded image, a text, or vectors. `metadata` None: what it has, if
    anything."""

    id: str
    content: bytes | str | Bare
    metadata: Metadata | None

    def digest(self) -> str:
        """Of the content: the same content again is no change."""
        if isinstance(self.content, bytes):
            return "image-" + hashlib.sha256(self.content).hexdigest()
        if isinstance(self.content, str):
            return "text-" + hashlib.sha256(self.content.encode()).hexdigest()
        bare = self.content
        parts = (bare.space.encode(), bare.embedding, (bare.side_space or "").encode(), bare.side)
        return "vectors-" + hashlib.sha256(b"\0".join(part or b"" for part in parts)).hexdigest()
