"""`python training/evaluate.py`: run nobackfill.training.cli.evaluate."""

from nobackfill.training.cli.evaluate import app

if __name__ == "__main__":
    app()
