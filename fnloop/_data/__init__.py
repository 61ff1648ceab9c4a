"""Batches as a function of seed and position: read, dealt to processes, and fetched ahead."""
