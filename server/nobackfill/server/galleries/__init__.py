"""Galleries that are served: their views and indexes, puts, and searches on one snapshot."""
