"""Checkpoints at an address, and those that another process is still writing."""
