"""Windows of an upgrade carried by other processes, here or on other machines."""
