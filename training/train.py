"""`python training/train.py`: run nobackfill.training.cli.train."""

if __name__ == "__main__":
    # Imported here, because worker processes that read images import this file too.
    from nobackfill.training.cli.train import app

    app()
