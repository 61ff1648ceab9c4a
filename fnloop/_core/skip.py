"""What a loss function returns for a batch that is to be left out."""

from __future__ import annotations

import attrs

from fnloop._display import checks

__all__ = ["BY_ANOTHER", "Skip", "skip"]

BY_ANOTHER = "left out by another process"  # why an update is skipped that another process skips


@attrs.frozen
class Skip:
    """The reply of a loss function that leaves its batch out.

    Args:
        reason: why.
    """

    reason: str


def skip(reason: str) -> Skip:
    """Leave a batch out: a loss function returns this instead of a loss.

    The batch is out of the window of ``accumulate`` and of its divisor, and its metrics do not
    count. If every batch of an update is left out, on all processes, there is no update:
    ``state.skipped`` counts it, and ``state.step``, schedules and averages stay. In an evaluation
    the batch is left out too. A warning is logged the first time that a reason is given.

    With several processes each decides by itself. But a loss function that exchanges something
    with the others, as ``SyncBatchNorm`` does, has to decide alike in all of them; under
    ``fully_shard`` any forward does so, and this is refused. There, return a weight of 0:
    ``return loss, {"weight": 0}``.

    Args:
        reason: why, in a few words, the same for all batches that are left out for it.

    Returns:
        What the loss function returns, alone.

    Raises:
        TypeError: the reason is not a str.
        ValueError: it is empty.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> def loss_fn(model, batch):
        ...     return skip("too long") if len(batch) > 2 else toy_loss(model, batch)
        >>> step = fl.pipeline(fl.accumulate(2))(loss_fn)
        >>> state, out = step(toy(), [torch.ones(3), torch.tensor([4.0])])
        >>> state.model.w.item()                    # the gradient of the other batch alone
        -4.0
        >>> state, out = step(state, [torch.ones(3)])
        >>> out.skip, state.step, state.skipped
        ('too long', 1, 1)
    """
    return Skip(checks.text("skip", "reason", reason, "why the batch is left out"))
