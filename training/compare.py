"""`python training/compare.py`: nobackfill.training.compare."""

from nobackfill.training.compare import app

if __name__ == "__main__":
    app()
