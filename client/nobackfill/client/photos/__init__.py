"""Image files of the device: found, added, embedded again, and searched."""
