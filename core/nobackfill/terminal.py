"""Make foreign text, such as names, reasons and messages of servers, safe to print in a
terminal."""

import unicodedata

# Unicode categories: control, format (direction marks), surrogate, line and paragraph separators.
_HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def escape_control(text: str) -> str:
    """Escape each character that moves the cursor, changes colours, begins a line or is invisible.

    Args:
        text: Any text.

    Returns:
        The text, with each such character as Python writes it: `\\x1b`. Line feeds and tabs are
        escaped, too; a backslash is not, so that the text cannot be decoded back.
    """
    if text.isprintable():
        return text
    return "".join(
        char.encode("unicode_escape").decode() if unicodedata.category(char) in _HIDDEN else char
        for char in text
    )
