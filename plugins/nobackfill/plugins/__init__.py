"""Features that a user can do without: each is a plug-in, found through an entry point.

pyproject.toml lists them by group. The rest of nobackfill imports none of them; it asks
`nobackfill.extras.load_plugin` for one by name.
"""
