"""Updates captured as CUDA graphs."""
