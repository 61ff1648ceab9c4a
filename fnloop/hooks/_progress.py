"""What a person sees while a run goes on."""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any, TextIO

from torch import Tensor

from fnloop._metrics import Last, read
from fnloop._state import EPOCH, RECORD, TrainState

__all__ = ["progress"]


class progress:
    """Show a bar per epoch, with loss, learning rate and updates per second.

    Where nobody looks at a terminal, it is a line per record. It reads from the device when it refreshes, and not in between.

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
        self._done: int | None = None  # updates of the running epoch, skipped ones too
        self._next = 0.0

    def __repr__(self) -> str:
        return "progress()" if self.refresh == 0.5 else f"progress(refresh={self.refresh})"

    def __call__(self, state: TrainState) -> TrainState:
        self._done = self._position(state) if self._done is None else self._done + 1
        if time.monotonic() >= self._next or EPOCH in state.news or RECORD in state.news:
            self._show(state)
        if EPOCH in state.news:
            self._end()
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Show where the run ended."""
        if self._bar is not None and EPOCH not in state.news:
            self._show(state)
        return state

    def _position(self, state: TrainState) -> int:
        window = state.run.window if state.run else 1
        if EPOCH in state.news:
            return (state.run and state.run.steps_per_epoch) or 1
        return -(-state.batch // window)

    def _show(self, state: TrainState) -> None:
        file = self.file or sys.stderr
        if not (_in_notebook() or file.isatty()):
            if RECORD in state.news:
                print(_line(state), file=file, flush=True)
            return
        run, ended = state.run, EPOCH in state.news
        if self._bar is None:
            epoch = state.epoch if ended else state.epoch + 1
            of = f"/{run.epochs}" if run and run.epochs else ""
            total = run.steps_per_epoch if run else None
            settings = {"unit": "step", "file": file, "mininterval": 0, "dynamic_ncols": True}
            self._bar = _bar_class()(total=total, desc=f"epoch {epoch}{of}", **settings)
        self._bar.set_postfix_str(self._facts(state), refresh=False)
        self._bar.n = self._done
        self._bar.refresh()

    def _facts(self, state: TrainState) -> str:
        facts: dict[str, float] = {}
        lr = Last(state.optimizer.param_groups[0]["lr"])
        if RECORD in state.news:
            facts.update(state.history[-1].metrics)
            if not isinstance(lr.value, Tensor):  # which would be a read more
                facts.setdefault("lr", lr.compute())
        else:
            running = {"loss": state.metrics["loss"]} if "loss" in state.metrics else {}
            facts.update(read({**running, "lr": lr}))  # the host read, at most once in `refresh` seconds
            self._next = time.monotonic() + self.refresh
        return ", ".join(f"{name} {value:.4g}" for name, value in facts.items())

    def _end(self) -> None:
        self._done = 0
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        """Finish the bar, when the run ends."""
        self._end()
        self._done = None


def _line(state: TrainState) -> str:
    record = state.history[-1]
    metrics = "  ".join(f"{name} {value:.5g}" for name, value in record.metrics.items())
    epoch = record.epoch + (EPOCH not in state.news)  # the one that is running, or has just ended
    return f"epoch {epoch}  step {record.step}  {metrics}"


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
