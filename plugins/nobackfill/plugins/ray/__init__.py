"""Ray clusters: their nodes run upgrades, fill galleries, and train for a comparison."""
