"""What earlier commits wrote, opened with the code of today."""
