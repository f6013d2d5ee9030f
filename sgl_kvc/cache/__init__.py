"""Prefix cache and compression: when a request's KVs are scored, compacted and freed."""
