"""Upgrades of one gallery: estimate, throttle, progress, backfill, neighbours kept."""
