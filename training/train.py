"""`python training/train.py`: nobackfill.training.cli.train."""

from nobackfill.training.cli.train import app

if __name__ == "__main__":
    app()
