"""The commands train, evaluate, export and compare: `python -m nobackfill.training.cli.train`.

Each module's `app` is a typer application, as `training/train.py` runs it.

>>> from nobackfill.training.cli.command import command_app
>>> [command.name for command in command_app("train", lambda: None, "").registered_commands]
['train']
"""
