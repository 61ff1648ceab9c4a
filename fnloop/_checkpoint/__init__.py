"""Checkpoints: the file format, saving, restoring, and which ones are kept."""
