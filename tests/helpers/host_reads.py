"""A count of the reads from the device, of one number and of several at once."""

from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CountReads(TorchDispatchMode):
    """Counts the reads from the device while it is entered."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __enter__(self):
        tolist = torch.Tensor.tolist

        def counted(tensor):
            self.count += 1
            return tolist(tensor)

        self.patch = mock.patch.object(torch.Tensor, "tolist", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))
