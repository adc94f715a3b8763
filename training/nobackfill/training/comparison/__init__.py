"""What compare.py trains and measures: presets, rows of the table, cells, claims."""
