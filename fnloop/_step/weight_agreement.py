"""What the processes of a run agree on about the weights of its batches."""

from __future__ import annotations

import torch
from torch import Tensor

from fnloop._backend.collectives import all_reduce_max, all_reduce_max_tensor
from fnloop._core.types import Output

__all__ = ["WeightAgreement", "is_left_out"]


def is_left_out(out: Output) -> bool:
    """Return whether the loss function has left a batch out by ``skip``: it has no loss."""
    return out.skip is not None and not out.loss.requires_grad


class WeightAgreement:
    """Facts about weights that are the same in every process, each exchanged once in a run."""

    def __init__(self) -> None:
        self._are_batch_sizes: bool | None = None
        self._reference: Tensor | None = None

    def is_settled(self, batch_size: int) -> bool:
        """Return whether a window can be weighed without an exchange."""
        if batch_size and self._are_batch_sizes is not False:
            return self._are_batch_sizes is True
        return self._reference is not None

    def is_uniform(self, out: Output, batch_size: int) -> bool:
        """Return whether all batches of a window weigh the same, in every process.

        Args:
            out: the output of its first batch.
            batch_size: the number of samples in every batch of it, or 0 if it may differ.
        """
        if not batch_size:
            return False
        if self._are_batch_sizes is None:
            known = not is_left_out(out)  # else it says nothing of the weights of others
            differs = known and ("weight" in out.aux or bool(out.weight != batch_size))
            any_differs, any_known = all_reduce_max([differs, known], "how batches weigh")
            if not any_known:
                return False
            self._are_batch_sizes = not any_differs
        return self._are_batch_sizes

    def check(self, out: Output, batch_size: int) -> None:
        """Raise if a batch does not weigh what the processes have agreed on."""
        if is_left_out(out):
            return
        if "weight" in out.aux or out.weight != batch_size:
            given = "what aux says" if "weight" in out.aux else out.weight
            raise ValueError(
                f"so far each batch of {batch_size} samples weighed {batch_size}, and now one "
                f"weighs {given}: return aux['weight'], the number of items, for every batch"
            )

    def reference(self, weight: Tensor) -> Tensor:
        """Return the weight that others count relative to, the same in every process.

        It is a power of two, so that it changes no bit of the mean.
        """
        if self._reference is None:
            largest = all_reduce_max_tensor(weight, "the weight of a batch").clamp(min=1)
            self._reference = torch.exp2(torch.floor(torch.log2(largest)))
        return self._reference
