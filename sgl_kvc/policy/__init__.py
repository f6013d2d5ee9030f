"""Eviction policies: a scorer says how much a key matters, an apportioner who gets pages."""
