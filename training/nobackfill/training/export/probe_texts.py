"""The texts that models are probed with: written here, no real note leaves with a release."""

PROBE_TEXTS = (
    "a red bicycle leans on a wall",
    "How do I carry vectors into another model's space?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "2026-11-22 10:00 meeting, room 4.12: budget +3.5 %",
    "def add(a: int, b: int) -> int: return a + b",
    "天気がいいから、散歩しましょう。",
    "one " * 600,
    "!",
)
