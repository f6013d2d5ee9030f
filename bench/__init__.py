"""Throughput and quality harnesses, and their recorded results."""
