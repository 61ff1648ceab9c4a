"""Updates captured as CUDA graphs, and what guards them."""
