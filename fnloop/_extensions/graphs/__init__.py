"""Updates captured as CUDA graphs or compiled as one function, and what guards them."""
