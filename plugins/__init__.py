"""Strategies: one file each, with its options."""
