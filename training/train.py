"""`python training/train.py`: run nobackfill.training.cli.train."""

from nobackfill.extras import run_command

if __name__ == "__main__":
    # Imported here, because worker processes that read images import this file too.
    run_command("nobackfill.training.cli.train", "training")
