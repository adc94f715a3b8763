"""Swaps of releases: admission, three rollouts, rollback, retirement, recovery."""
