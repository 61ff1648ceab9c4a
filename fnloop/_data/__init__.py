"""Batches from a position: loaders opened, dealt to processes, fetched ahead."""
