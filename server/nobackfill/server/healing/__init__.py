"""Galleries that heal where people look: see healing.py."""
