"""The command `edge-client`, a file for each group of verbs; nothing below imports from here."""
