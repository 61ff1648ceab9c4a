"""What a person sees while a run goes on."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any, TextIO

from fnloop._state import EPOCH, RECORD, TrainState

__all__ = ["progress"]


class progress:
    """Show a bar per epoch: loss, learning rate, updates per second. A line per record where nobody looks at a
    terminal.

    It reads from the device when it refreshes, and not in between.

    Args:
        refresh: seconds between two looks, at least 0.5.
        file: where to; stderr by default.

    Returns:
        A hook.

    Raises:
        ValueError: refresh is below 0.5.

    Example:
        >>> import fnloop as fl, sys, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)] * 3, hooks=(progress(file=sys.stdout),))
        epoch 1  step 3  train/loss -1
    """

    def __init__(self, refresh: float = 0.5, file: TextIO | None = None) -> None:
        if not refresh >= 0.5:
            raise ValueError(f"progress expects refresh >= 0.5 seconds, to leave the device alone; got {refresh!r}")
        self.refresh, self.file = refresh, file
        self._bar: Any = None
        self._next = 0.0

    def __repr__(self) -> str:
        return "progress()" if self.refresh == 0.5 else f"progress(refresh={self.refresh})"

    def __call__(self, state: TrainState) -> TrainState:
        if not state.news and state.stop is None:
            return state
        now = time.monotonic()
        if now < self._next and EPOCH not in state.news and RECORD not in state.news and state.stop is None:
            return state
        self._next = now + self.refresh
        file = self.file or sys.stderr
        if not (_in_notebook() or file.isatty()):
            if RECORD in state.news:
                print(_line(state), file=file, flush=True)
            return state
        self._refresh(state, file)
        return state

    def _refresh(self, state: TrainState, file: TextIO) -> None:
        ended = EPOCH in state.news
        run, window = state.run, state.run.window if state.run else 1
        done = -(-state.batch // window)
        total = run.steps_per_epoch if run else None
        if self._bar is None:
            epoch = state.epoch if ended else state.epoch + 1
            of = f"/{run.epochs}" if run and run.epochs else ""
            self._bar = _bar_class()(
                total=total,
                desc=f"epoch {epoch}{of}",
                unit="step",
                file=file,
                mininterval=0,
                dynamic_ncols=True,
            )
        self._bar.set_postfix_str(_facts(state), refresh=False)
        if ended and total is not None:
            done = total
        self._bar.update(max(done - self._bar.n, 0))
        self._bar.refresh()
        if ended or state.stop is not None:
            self.close()

    def close(self) -> None:
        """Finish the bar; the next call begins another."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._next = 0.0


def _facts(state: TrainState) -> str:
    facts = {}
    if RECORD in state.news:
        facts.update(state.history[-1].metrics)
    elif "loss" in state.metrics:
        facts["loss"] = state.metrics["loss"].compute()  # the host read, at most twice a second
    facts.setdefault("lr", float(state.optimizer.param_groups[0]["lr"]))
    return ", ".join(f"{name} {value:.4g}" for name, value in facts.items())


def _line(state: TrainState) -> str:
    record = state.history[-1]
    metrics = "  ".join(f"{name} {value:.5g}" for name, value in record.metrics.items())
    return f"epoch {record.epoch}  step {record.step}  {metrics}"


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")


def _bar_class() -> Any:
    if _in_notebook() and importlib.util.find_spec("ipywidgets"):
        from tqdm.notebook import tqdm
    else:
        from tqdm import tqdm
    return tqdm
