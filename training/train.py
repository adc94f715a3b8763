"""`python training/train.py`: nobackfill.training.train."""

from nobackfill.training.train import app

if __name__ == "__main__":
    app()
