"""Stores of vectors that live elsewhere, each by one small Protocol (source.py)."""
