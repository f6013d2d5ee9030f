"""Everything that is measured on a GPU: correctness, bandwidth, serving, overhead."""
