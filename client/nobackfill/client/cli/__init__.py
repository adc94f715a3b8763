"""The command `edge-client`; nothing below imports from here."""
