"""Measure retrieval quality, and how compatible two models are: numpy in, numpy out.

Vectors are float [n, dim] and labels int [n]; a smaller distance is nearer. A figure has one number
for each query, NaN where nothing is relevant to it.

>>> import numpy as np
>>> from nobackfill import metrics
>>> from nobackfill.metrics import average_precision, cmc, mean_of_answerable
>>> queries, gallery = np.array([[1, 0], [0, 1]]), np.array([[1, 0], [0, 1], [0, 0]])
>>> relevance = metrics.relevance_by_label([0, 1], [1, 1, 0])
>>> ranking = metrics.rank(queries, gallery, relevance)
>>> cmc(ranking, 1).tolist()
[0.0, 1.0]
>>> round(mean_of_answerable(average_precision(ranking)), 3)
0.667
"""

from nobackfill.metrics.backfill import (
    BackfillCurve as BackfillCurve,
    backfill_curve as backfill_curve,
    class_order as class_order,
    random_order as random_order,
    uncertainty_order as uncertainty_order,
)
from nobackfill.metrics.bootstrap import (
    Difference as Difference,
    paired_bootstrap as paired_bootstrap,
)
from nobackfill.metrics.cka import linear_cka as linear_cka
from nobackfill.metrics.compatibility import (
    degradation as degradation,
    closed_gap_share as closed_gap_share,
    is_compatible as is_compatible,
    negative_flips as negative_flips,
    retention as retention,
    strict_criterion as strict_criterion,
    update_gain as update_gain,
    upgrade_gain as upgrade_gain,
)
from nobackfill.metrics.identification import (
    open_set_search as open_set_search,
    tpir_at_fpir as tpir_at_fpir,
)
from nobackfill.metrics.neighbours import exact_neighbours as exact_neighbours
from nobackfill.metrics.ranking import (
    Ranking as Ranking,
    Relevance as Relevance,
    rank as rank,
    relevance_by_label as relevance_by_label,
)
from nobackfill.metrics.retrieval import (
    average_precision as average_precision,
    average_precision_at as average_precision_at,
    cmc as cmc,
    mean_of_answerable as mean_of_answerable,
)
from nobackfill.metrics.verification import tar_at_far as tar_at_far
