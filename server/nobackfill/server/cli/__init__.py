"""The command `gateway`: serving, operating, backups, and Triton's environment."""
