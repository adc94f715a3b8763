"""Which hosts are this machine: what goes there may travel in the clear."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine, whoever is asked: `localhost`, or an address of the loopback
    device, of IPv6 with brackets or without. Any other name counts as not, wherever it leads."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return host == "localhost"
