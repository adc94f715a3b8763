"""Optional features: each is a plug-in, found by its entry point.

pyproject.toml lists the entry points by group. The rest of nobackfill imports no plug-in; it asks
`nobackfill.extras.load_plugin` for one by name.
"""
