"""The engine of searches during a change of model.

It chooses candidates, fuses ranks, re-embeds items from their source, and keeps the ledger of that
work. `nobackfill.serve` uses it for galleries in their own database, the gateway for its galleries,
and `nobackfill fit` to predict what a search finds.

>>> from nobackfill.serving import FolderItems, LedgerFile, collect_candidates
>>> collect_candidates(lambda count: ["a", "b"], lambda count: ["b", "c"])
['a', 'b', 'c']
>>> FolderItems(folder).read("no such.png", most_bytes=1000)
>>> ledger = LedgerFile(folder / "ledger.sqlite")
>>> ledger.claim(["a", "b", "c"], day="2026-11-26", budget=2)
['a', 'b']
>>> ledger.requested_keys(10)
['c']
>>> ledger.close()
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.serving.fusion import (
        FittedRankFusion as FittedRankFusion,
        OddsLine as OddsLine,
        collect_candidates as collect_candidates,
    )
    from nobackfill.serving.ledger import Ledger as Ledger, LedgerFile as LedgerFile
    from nobackfill.serving.reembedding import (
        EmbeddingCost as EmbeddingCost,
        ReembeddingLimits as ReembeddingLimits,
        Reembedding as Reembedding,
        Backoff as Backoff,
    )
    from nobackfill.serving.sources import (
        FolderItems as FolderItems,
        FunctionItems as FunctionItems,
        ItemSource as ItemSource,
        JsonLinesItems as JsonLinesItems,
        UrlItems as UrlItems,
    )
else:
    __getattr__ = export_lazily(__name__)
