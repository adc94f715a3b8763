"""Run upgrades in other processes, on this machine or on others."""
