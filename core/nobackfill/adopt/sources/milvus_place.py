"""Where a Milvus is, a server or a file of milvus-lite, and what its errors mean."""

import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from nobackfill.adopt.sources.server_address import server_address
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
)
from nobackfill.extras import extra

with extra("milvus"):
    import grpc
    from pymilvus import MilvusClient
    from pymilvus.exceptions import MilvusException

Result = TypeVar("Result")
# The variable that holds a server's token, or USER:PASSWORD.
KEY = "NOBACKFILL_MILVUS_TOKEN"
_SECONDS = 60.0
_PORT = 19530
_CODES: Mapping[int, type[NobackfillError]] = {
    1: UnavailableError, 2: UnavailableError, 7: NotPermittedError, 100: NotFoundError,
    1400: NotPermittedError,
}  # fmt: skip


# Processes in which clients were opened: the first, and none that it forks.
_OPENERS: list[int] = []


def opened(place: str) -> Any:
    """The client of https://HOST:PORT (http:// on this machine), with /DATABASE where it is not the
    default one, or of a file. Raises NotFoundError, ConfigurationError, UnavailableError."""
    # It logs each failed call with the address in it.
    logging.getLogger("pymilvus").setLevel(logging.CRITICAL)
    _OPENERS.append(os.getpid())
    if "://" not in place:
        path = Path(place)
        if not path.exists():
            raise NotFoundError(f"{place}: no file of milvus-lite is there")
        return asked(path.name, lambda: MilvusClient(uri=str(path.resolve())))
    parts = server_address(place, "milvus", KEY)
    database = parts.path.strip("/")
    if "/" in database:
        raise ConfigurationError("milvus: expected https://HOST:PORT or https://HOST:PORT/DATABASE")
    address = f"{parts.scheme}://{parts.hostname}:{parts.port or _PORT}"
    token = os.environ.get(KEY, "")
    return asked(
        str(parts.hostname),
        lambda: MilvusClient(uri=address, token=token, db_name=database, timeout=_SECONDS),
    )


def asked(name: str, work: Callable[[], Result]) -> Result:
    """Run `work` and return its result; errors of Milvus become ours, and so does a fork since it
    was opened."""
    if os.getpid() != _OPENERS[0]:
        raise ConfigurationError(
            f"{name}: Milvus was opened before this process was forked, which its client does not "
            "survive; open it after the fork alone, in each process"
        )
    try:
        return work()
    except MilvusException as error:
        kind = _CODES.get(error.code, InvalidInputError)
        said = str(error.message).strip().splitlines() or [type(error).__name__]
        raise kind(f"{name}: Milvus says: {said[0][:200]}") from error
    except grpc.RpcError as error:
        raise UnavailableError(f"{name}: Milvus does not answer") from error
