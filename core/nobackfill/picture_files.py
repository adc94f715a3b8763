"""Picture files in folders: which suffixes are taken, and which names are no pictures of anybody's.

A folder of photographs also holds what cameras, systems and programs keep beside them.
"""

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
# They need the extra `heic`.
HEIF_SUFFIXES = (".heic", ".heif", ".avif")
# A NAS's small copies, and macOS's second halves of files.
_CLUTTER = frozenset({"@eaDir", "__MACOSX"})


def is_picture(name: str) -> bool:
    """Whether a file is a picture that is taken, by its suffix."""
    return name.lower().endswith(SUFFIXES + HEIF_SUFFIXES)


def is_clutter(name: str) -> bool:
    """Whether a file or folder is none of the pictures in a folder: hidden (`.Trash`, `._IMG.jpg`),
    `@eaDir` or `__MACOSX`."""
    return name.startswith(".") or name in _CLUTTER


def not_taken(name: str) -> str:
    """Why a file of another suffix is refused."""
    dot = name.rpartition(".")
    suffix = f".{dot[2].lower()}" if dot[1] and dot[0] else "no suffix"
    return f"expected a picture ({', '.join(SUFFIXES + HEIF_SUFFIXES)}), got {suffix}"
