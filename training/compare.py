"""`python training/compare.py`: nobackfill.training.cli.compare."""

from nobackfill.training.cli.compare import app

if __name__ == "__main__":
    app()
