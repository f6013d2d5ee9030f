"""The throughput harness, the servers of the tests, and recorded results."""
