"""One update: the loss function, backward, the optimizer, and the pipeline around them."""
