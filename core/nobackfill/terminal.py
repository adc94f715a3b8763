"""Text from elsewhere, such as names, reasons and a server's words, as a terminal may show it."""

import unicodedata

# Controls, invisible and direction marks, halves of characters, separators of lines.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def visible(text: str) -> str:
    """`text` in which nothing moves the cursor, changes colours, begins a line or hides: each such
    character is written as Python writes it, like `\\x1b`."""
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char
        for char in text
    )
