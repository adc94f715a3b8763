"""How far a gallery has healed, in words."""

from nobackfill.v1 import upgrade_pb2


def healed(healing: upgrade_pb2.Healing) -> str:
    """One line: how far a gallery has healed, and what that has cost."""
    share = "counted"
    if healing.HasField("carried"):
        native = healing.items - healing.carried
        share = f"{native} of {healing.items} native ({native / max(1, healing.items):.1%})"
    seconds = healing.seconds.ToTimedelta().total_seconds()
    line = (
        f"  healing: {share}, {healing.today} of {healing.a_day} today, {healing.embedded} made in "
        f"{seconds:.1f} s from {healing.bytes_read} bytes, {healing.failed} in vain"
    )
    return line + (f": {healing.last_failure}" if healing.last_failure else "")
