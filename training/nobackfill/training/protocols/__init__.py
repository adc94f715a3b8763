"""Published test protocols, read from their original files: queries, galleries and relevance.

Readers return image names in the order of the vectors, and the relevance for `nobackfill.metrics`.
A `Protocol` combines images and figures. `protocols.evaluation` lists all by name.

>>> from nobackfill.training.protocols.evaluation import protocol_named
>>> protocol = protocol_named("market1501")(market1501, folder)
>>> len(protocol.queries), len(protocol.gallery)
(1, 1)
"""
