"""Read a release: its manifest, its models, and the routes of upgrades between releases.

`nobackfill.release.publishing` publishes releases; `nobackfill.release.trust` verifies a
publication.

>>> from nobackfill.release import open_route, plan_route
>>> from nobackfill.release.trust import read_publication
>>> manifests = read_publication(model_repo).manifests
>>> route = plan_route(manifests, 1, 2, side_space=manifests[1].side_space)
>>> route.releases
(1, 2)
>>> upgraded = open_route(model_repo, route).run(embedding, side)
>>> upgraded.embedding.shape == (len(embedding), manifests[2].embedder.dim)
True
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.release.calibration import (
        Scorer as Scorer,
        match_probabilities as match_probabilities,
    )
    from nobackfill.release.manifest import (
        Calibration as Calibration,
        Manifest as Manifest,
        Upgrade as Upgrade,
    )
    from nobackfill.release.models import (
        ImageEmbedder as ImageEmbedder,
        SideEncoder as SideEncoder,
        UpgradeModel as UpgradeModel,
        Upgraded as Upgraded,
        open_embedder as open_embedder,
        open_side_encoder as open_side_encoder,
        open_upgrade as open_upgrade,
    )
    from nobackfill.release.probes import check_release as check_release
    from nobackfill.release.manifest import parse_manifest as parse_manifest
    from nobackfill.release.probes import check_probes as check_probes
    from nobackfill.release.text_models import (
        TextModel as TextModel,
        open_text_encoder as open_text_encoder,
    )
    from nobackfill.release.routes import (
        Route as Route,
        RouteRunner as RouteRunner,
        iterate_routes as iterate_routes,
        open_route as open_route,
        plan_route as plan_route,
    )
else:
    __getattr__ = export_lazily(__name__)
