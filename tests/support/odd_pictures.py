"""Pictures that a camera, an editor or an attacker may hand over, by what is odd about them."""

from tests.support.pictures import KINDS, blank_png, png

_PNG, _JPEG, _WEBP = KINDS["png"], KINDS["jpeg"], KINDS["webp"]

ODD: dict[str, bytes] = {
    **KINDS,
    **{f"{name}, cut": data[: len(data) // 2] for name, data in KINDS.items()},
    **{f"{name}, with a tail": data + b"tail" * 99 for name, data in KINDS.items()},
    "nothing": b"",
    "a byte": b"\xff",
    "text": b"hello" * 100,
    "a GIF": b"GIF89a\x01\x00\x01\x00\x00\x00\x00;",
    "a PDF": b"%PDF-1.7\n" * 20,
    "an SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "a head of PNG": _PNG[:8],
    "a head of JPEG": _JPEG[:3],
    "a head of WebP": _WEBP[:12],
    "PNG in JPEG": _JPEG[:20] + _PNG,
    "0 x 0": png(0, 0, b""),
    "0 wide": png(0, 5, b"\0" * 5),
    "the widest number": png(2**31 - 1, 1, b"\0"),
    "more than it says": png(1, 1, b"\0" * 10_000),
    "less than it says": png(4000, 4000, b"\0"),
    "a bomb": blank_png(30_000, 1_000),
    "one row": blank_png(5000, 1),
    "one column": blank_png(1, 5000),
    "a bad depth": png(4, 4, b"\0" * 20, depth=3),
    "bad colours": png(4, 4, b"\0" * 20, colours=7),
}
