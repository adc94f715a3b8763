"""A Ray cluster: its nodes carry upgrades, fill galleries, and run a comparison's trainings."""
