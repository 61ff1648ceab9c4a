"""One update: the pipeline, the loss function, backward, the optimizer, and engines."""
