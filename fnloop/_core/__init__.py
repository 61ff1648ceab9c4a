"""The values: states, metrics, histories, generators, and their types."""
