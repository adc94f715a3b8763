"""The command `edge-client`; no module below imports this package."""
