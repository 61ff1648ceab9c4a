"""What a job of several processes needs to meet, and to say what it has come to."""

import contextlib
import functools
import logging
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

COUNTS = (1, 2, 3)
FEW = (1, 2)  # for long jobs, where other tests show what an odd number changes


def rank():
    return int(os.environ.get("RANK", "0"))


def world():
    return int(os.environ.get("WORLD_SIZE", "1"))


def join():
    """Let the processes of this job meet, before a model is sharded over them."""
    if world() > 1 and not dist.is_initialized():
        dist.init_process_group("gloo")


def in_double(job):
    """Decorate a job whose processes have met, and whose numbers are of double precision."""

    @functools.wraps(job)
    def run(*arguments, **settings):
        join()
        with default_dtype(torch.float64):
            return job(*arguments, **settings)

    return run


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def difference(a, b):
    """Return the largest difference of two lists of numbers, relative to the largest of them."""
    a, b = np.array(a), np.array(b)
    assert a.shape == b.shape
    return float(np.abs(a - b).max() / np.abs(a).max())


def flat(tensors):
    return torch.cat([whole(t).detach().flatten() for t in tensors]).tolist()


def come_to(state):
    records = [record for record in state.history if not record.closing]
    losses = [r.metrics.get("train/loss", r.metrics.get("recent/loss")) for r in records]
    return {
        "weights": flat(state.model.parameters()),
        "counters": [state.step, state.epoch, state.batch],
        "updates": dict(state.updates),
        "history": losses,
        "items": [record.items for record in records],
    }


@contextlib.contextmanager
def logged():
    """Give a list of what fnloop logs."""
    log, lines = logging.getLogger("fnloop"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield lines
    finally:
        log.removeHandler(handler)


def said(do):
    try:
        return do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def nearly(a, b, tolerance):
    """Return whether two nestings of numbers are equal up to rounding."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(nearly(a[k], b[k], tolerance) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(nearly(x, y, tolerance) for x, y in zip(a, b, strict=True))
    return a == b or a == pytest.approx(b, rel=tolerance, abs=tolerance)
