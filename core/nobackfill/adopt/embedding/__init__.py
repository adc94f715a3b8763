"""Embedding items by models that others trained."""
