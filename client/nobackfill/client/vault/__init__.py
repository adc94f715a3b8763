"""Encrypted backup of images on a gateway: keys, encryption, the queue, transfers."""
