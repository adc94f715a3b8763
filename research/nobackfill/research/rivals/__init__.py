"""Rivals: ways to search vectors of an old model with queries of a new one, on frozen vectors.

A rival is one file of this folder with one class. To add yours, write a class with the members of
`Rival`, and add a line to rows.py. `python training/compare.py --vectors FILE.npz` measures it
beside all others.
"""
