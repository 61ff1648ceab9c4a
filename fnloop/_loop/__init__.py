"""The loop: fit, its boundaries, signals, evaluation and prediction."""
