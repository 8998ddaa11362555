"""Attention over caches: where it stands, and what it computes."""
