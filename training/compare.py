"""`python training/compare.py`: run nobackfill.research.compare, or explain its absence."""

from importlib.util import find_spec

from nobackfill.training.cli.compare import refuse

if __name__ == "__main__":
    if find_spec("nobackfill.research") is None:
        refuse()
    from nobackfill.research.compare import app

    app()
