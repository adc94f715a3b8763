"""Published test protocols, read from their real files: what is asked, what counts as an answer.

Readers hold no images and no vectors. They give image names in the order in which vectors are
expected, and the relevance for `metrics`.
"""
