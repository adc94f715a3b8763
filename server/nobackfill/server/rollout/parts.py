"""The parts of a gateway that activations move together."""

from dataclasses import dataclass

from nobackfill.server.canary.canaries import Canaries
from nobackfill.server.catalog import Catalog
from nobackfill.server.galleries.galleries import Galleries
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.rollout.admission import Admission
from nobackfill.server.serving import Serving
from nobackfill.server.state import GatewayState
from nobackfill.server.upgrades.upgrading import Upgrading


@dataclass(frozen=True)
class Parts:
    """One gateway's."""

    admission: Admission
    catalog: Catalog
    state: GatewayState
    galleries: Galleries
    upgrading: Upgrading
    serving: Serving
    canaries: Canaries
    metrics: Metrics
