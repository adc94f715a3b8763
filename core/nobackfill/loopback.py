"""Decide which hosts are this machine: traffic to them may be unencrypted."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Check whether a host is this machine, without a DNS query.

    Args:
        host: `localhost`, or an IPv4 or IPv6 address, with or without brackets. Any other name
            gives False, wherever it resolves to. An empty text and `LOCALHOST` give False.
    """
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
