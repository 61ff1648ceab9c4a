"""Seeds, and how often they were set."""

import random

import numpy as np
import torch

from fnloop._core.rng import seed_all, seed_all_count


def drawn():
    return torch.rand(()).item(), random.random(), np.random.rand()


def test_a_seed_positions_all_generators_and_is_counted():
    before = seed_all_count()
    seed_all(3)
    first = drawn()
    seed_all(3)
    assert drawn() == first != drawn()
    assert seed_all_count() == before + 2
