"""Engines besides the one of a single process: several processes, and exact arithmetic."""
