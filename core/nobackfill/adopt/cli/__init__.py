"""The command `nobackfill`.

>>> from nobackfill.adopt.cli.app import app
>>> [command.callback.__name__ for command in app.registered_commands]
['inspect', 'sample', 'embed', 'fit', 'carry']
"""
