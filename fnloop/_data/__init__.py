"""Batches as a function of seed and position: how a loader is read, and fetched ahead."""
