"""`python training/export.py`: run nobackfill.training.cli.export."""

from nobackfill.extras import run_command

if __name__ == "__main__":
    run_command("nobackfill.training.cli.export", "training")
