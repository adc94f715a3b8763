"""The gateway: galleries over gRPC, models in Triton, releases swapped under traffic.

`gateway serve` runs it; a program of its own may, too. Needs the extra `server`.

>>> from nobackfill.server import GatewayServer, load_settings
>>> options = {"model_repo": model_repo, "data": folder / "gateway", "triton": "in-process"}
>>> ports = {"address": "127.0.0.1:0", "metrics_address": "127.0.0.1:0"}
>>> gateway = GatewayServer(load_settings({**options, **ports}, None))
>>> gateway.start()
>>> gateway.address.startswith("127.0.0.1:")
True
>>> gateway.stop()
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.server.gateway import GatewayServer as GatewayServer
    from nobackfill.server.settings import Settings as Settings, load_settings as load_settings
else:
    __getattr__ = export_lazily(__name__)
