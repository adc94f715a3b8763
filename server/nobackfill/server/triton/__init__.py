"""Triton as a child process: its environment, its start and restarts, models loaded into it."""
