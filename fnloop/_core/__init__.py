"""The values: states, metrics, histories, averages, generators, and what is frozen."""
