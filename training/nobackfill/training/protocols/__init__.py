"""Published test protocols, read from their real files: what is asked, what counts as an answer.

Readers give image names in the order in which vectors are expected, and the relevance for
`nobackfill.metrics`; a `Protocol` joins images and figures. All of them, by name: `catalogue`.

>>> from nobackfill.training.protocols.evaluation import protocol_named
>>> protocol = protocol_named("market1501")(market1501, folder)
>>> len(protocol.queries), len(protocol.gallery)
(1, 1)
"""
