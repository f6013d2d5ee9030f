"""The throughput harness, what a policy costs, everything to measure on a GPU; results."""
