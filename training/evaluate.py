"""`python training/evaluate.py`: nobackfill.training.evaluate."""

from nobackfill.training.evaluate import app

if __name__ == "__main__":
    app()
