"""Use one thread: results must not depend on the number of cores, and several tests run at once."""

import torch

torch.set_num_threads(1)
