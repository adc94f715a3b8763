"""Sources of images, and how far a gallery has healed, as messages."""

from nobackfill.server.grpc import calls
from nobackfill.server.grpc.tokens import Role
from nobackfill.server.healing.healer import Progress
from nobackfill.server.healing.registration import Source
from nobackfill.v1 import gallery_pb2, upgrade_pb2


def from_source(message: gallery_pb2.ItemSource) -> Source | None:
    """None for an empty address. Raises InvalidInputError."""
    if not message.address:
        return None
    return Source.checked(
        message.address,
        hits=message.hits,
        seconds=message.patience.ToTimedelta().total_seconds(),
        bytes_a_query=message.bytes_a_query,
        concurrency=message.concurrency,
        a_day=message.items_a_day,
    )


def to_source(source: Source, *, address: bool) -> gallery_pb2.ItemSource:
    """`address`: whether the caller may know where it is."""
    message = gallery_pb2.ItemSource(
        address=source.address if address else "",
        hits=source.hits,
        bytes_a_query=source.bytes_a_query,
        concurrency=source.concurrency,
        items_a_day=source.a_day,
    )
    message.patience.FromNanoseconds(int(1e9 * source.seconds))
    return message


def to_healing(progress: Progress) -> upgrade_pb2.Healing:
    """What WatchUpgrade tells."""
    cost = progress.cost
    message = upgrade_pb2.Healing(
        items=progress.items,
        carried=progress.carried,
        today=progress.today,
        a_day=progress.a_day,
        embedded=cost.embedded,
        failed=cost.failed,
        bytes_read=cost.bytes,
    )
    if calls.current().principal.role is Role.ADMIN:
        message.last_failure = cost.last_failure
    message.seconds.FromNanoseconds(int(1e9 * cost.seconds))
    return message
