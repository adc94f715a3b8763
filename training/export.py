"""`python training/export.py`: nobackfill.training.export."""

from nobackfill.training.export import app

if __name__ == "__main__":
    app()
