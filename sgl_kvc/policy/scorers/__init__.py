"""Scorers, one method a file."""
