"""`python training/evaluate.py`: run nobackfill.training.cli.evaluate."""

from nobackfill.extras import run_command

if __name__ == "__main__":
    run_command("nobackfill.training.cli.evaluate", "training")
