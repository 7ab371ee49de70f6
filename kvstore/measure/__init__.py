"""Measure this machine: a store of a million blocks, and computing against restoring."""
