"""`python training/train.py`: nobackfill.training.cli.train."""

if __name__ == "__main__":
    # Here, as processes that read images import this file, too.
    from nobackfill.training.cli.train import app

    app()
