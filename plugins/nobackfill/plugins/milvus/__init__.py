"""Milvus: collections that `nobackfill` carries over, as a source."""
