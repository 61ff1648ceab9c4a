"""The fold of a step over batches: plan, boundaries, signals, evaluation, prediction."""
