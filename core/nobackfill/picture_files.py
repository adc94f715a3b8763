"""Recognise picture files by name, and files that cameras and systems add to them."""

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
# These need the extra `heic`.
HEIF_SUFFIXES = (".heic", ".heif", ".avif")
# Thumbnails of a NAS, and resource forks of macOS.
_CLUTTER = frozenset({"@eaDir", "__MACOSX"})


def is_picture(name: str) -> bool:
    """Tell whether a file name has the suffix of a picture that this project reads, in any case.

    HEIC, HEIF and AVIF count, even without the extra `heic` that decodes them. The file is not
    opened.

    Args:
        name: A file name, or a path.
    """
    return name.lower().endswith(PICTURE_SUFFIXES + HEIF_SUFFIXES)


def is_hidden_or_system(name: str) -> bool:
    """Tell whether a file or folder is no photograph: hidden (`.Trash`, `._IMG.jpg`), `@eaDir` or
    `__MACOSX`.

    Args:
        name: The name without its folder; the empty name is none.
    """
    return name.startswith(".") or name in _CLUTTER


def explain_refused_suffix(name: str) -> str:
    """Explain why a file is refused that has the suffix of no picture.

    Args:
        name: File name without its folder; a hidden file without a further dot has no suffix.

    Returns:
        A sentence for an error message, without the name.
    """
    dot = name.rpartition(".")
    suffix = f".{dot[2].lower()}" if dot[1] and dot[0] else "no suffix"
    return f"expected a picture ({', '.join(PICTURE_SUFFIXES + HEIF_SUFFIXES)}), got {suffix}"
