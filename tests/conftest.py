"""One thread: the tests are small, several run at once, and results must not depend on how many cores there are."""

import torch

torch.set_num_threads(1)
