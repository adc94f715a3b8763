"""A Ray cluster that is joined: by upgrades, by bulk embedding, by a comparison's trainings."""

import os
import socket

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.extras import extra

# A head takes a connection in this time. What takes one and is no Ray is asked once, which takes
# 40 s; of itself Ray asks for many minutes.
_WAIT_S = 5.0
_TRIES, _TRIED = "1", "RAY_gcs_server_port_wait_time_s"


def join(address: str) -> None:
    """Make this process a driver of a cluster that this machine is a node of: `address` is
    HOST:PORT of its head, or auto for the one that runs here. `ray.shutdown` leaves it.

    Raises ConfigurationError, UnavailableError, which says what to do.
    """
    # Nothing is told to anybody about its use.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with extra("ray"):
        import ray
        from ray._private.services import canonicalize_bootstrap_address as found
    given = os.environ.get(_TRIED)
    os.environ.setdefault(_TRIED, _TRIES)
    try:
        head = found(address)
        if head is not None:
            host, port = head.rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), _WAIT_S).close()
        ray.init(address, namespace="nobackfill", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError) as error:
        raise UnavailableError(
            f"no Ray cluster answers at {address}: start one with `ray start --head`, or look at "
            "--ray; what a dead one left is cleared by `ray stop`"
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"--ray: expected auto or HOST:PORT, got {address}") from error
    finally:
        if given is None:
            del os.environ[_TRIED]
