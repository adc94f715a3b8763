"""Losses: one loss or family of terms per file, as free functions with the paper's equation.

Unless a docstring says otherwise: embeddings are float [n, dim], labels int64 [n] of the classifier
that is used, weights float [classes, dim]. A function returns one value per row, so that methods
can weight rows before they average.

>>> import torch
>>> from nobackfill.training.losses.pairwise import regression_loss
>>> regression_loss(torch.ones(2, 3), torch.zeros(2, 3)).tolist()
[3.0, 3.0]
"""
