"""`python training/export.py`: run nobackfill.training.cli.export."""

from nobackfill.training.cli.export import app

if __name__ == "__main__":
    app()
