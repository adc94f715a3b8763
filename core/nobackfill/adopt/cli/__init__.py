"""The command `nobackfill`."""
