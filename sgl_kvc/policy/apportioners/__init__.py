"""Apportioners, one method a file."""
