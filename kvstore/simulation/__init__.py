"""A workload replayed through the store's own eviction policy, with payloads left out."""
