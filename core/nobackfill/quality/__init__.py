"""How good it is: the compatibility matrix of releases, measured once for everybody who asks.

```
from nobackfill.class_folders import list_images
from nobackfill.quality.cells import every_cell
from nobackfill.quality.embedded import Published
from nobackfill.quality.matrix import evaluate_cells

images = Published(list_images(folder), model_repo, manifests)
cells = evaluate_cells(every_cell(manifests), images, images, relevance, neighbours=0)
```

`cells` names what is measured, `embedded` brings the vectors, `retrieval` searches them; `matrix`,
`criterion` and `backfill` tell what an upgrade keeps, `calibrate` fits distances to probabilities,
and `gate` lets a release out.
"""
