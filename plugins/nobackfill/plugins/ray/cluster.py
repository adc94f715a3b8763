"""Join a Ray cluster, for upgrades, bulk embedding or a comparison's trainings."""

import os
import socket

from nobackfill.errors import ConfigurationError, UnavailableError
from nobackfill.extras import require_extra

# How long a head may take to accept a connection. Ray's own check takes 40 s per try; it tries for
# many minutes by default, and once here.
_WAIT_S = 5.0
_TRIES, _TRIES_VARIABLE = "1", "RAY_gcs_server_port_wait_time_s"


def join_cluster(address: str) -> None:
    """Make this process a driver of a Ray cluster; this machine must be a node of it.

    `ray.shutdown` leaves the cluster. Ray's usage statistics are turned off, unless the environment
    sets RAY_USAGE_STATS_ENABLED. Blocks for some seconds. Call it once, until `ray.shutdown`.

    Args:
        address: HOST:PORT of the head, or auto for the cluster that RAY_ADDRESS names, else for one
            that runs on this machine.

    Raises:
        ConfigurationError: the address has another form, or the extra `ray` is not installed.
        UnavailableError: no cluster answers there within 5 s, or Ray is joined already.
    """
    # Send no usage statistics to Ray's makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with require_extra("ray"):
        import ray
        from ray._private.services import canonicalize_bootstrap_address as resolve
    previous = os.environ.get(_TRIES_VARIABLE)
    os.environ.setdefault(_TRIES_VARIABLE, _TRIES)
    try:
        head = resolve(address)
        if head is not None:
            host, port = head.rsplit(":", 1)
            socket.create_connection((host.strip("[]"), int(port)), _WAIT_S).close()
        ray.init(address, namespace="nobackfill", log_to_driver=False, configure_logging=False)
    except (OSError, RuntimeError) as error:
        raise UnavailableError(
            f"no Ray cluster answers at {address}; start one with `ray start --head`, or correct "
            "the address in --ray. `ray stop` removes the remains of a dead cluster"
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"--ray: expected auto or HOST:PORT of a Ray cluster's head, got {address}; correct "
            "the address"
        ) from error
    finally:
        if previous is None:
            del os.environ[_TRIES_VARIABLE]
