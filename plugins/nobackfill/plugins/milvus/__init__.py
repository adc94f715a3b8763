"""Milvus: a store that searches for galleries in PostgreSQL, and a source of `nobackfill`."""
