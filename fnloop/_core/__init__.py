"""The values: states, metrics, histories, generators, and what is frozen."""
