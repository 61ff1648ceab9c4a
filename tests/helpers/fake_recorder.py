"""A fake of CUDA graphs on the CPU: it records operators and replays them without our Python.

As with a graph, recording has no effect on any tensor, Python values are constants, reading a
tensor is an error, and a replay overwrites the tensors that were created during the recording.
"""

import contextlib
import itertools
import types

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def tensors(value):
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def as_from_torch(trace):
    """Return a traceback without the frame of the recording at its end."""
    if trace is None or trace.tb_frame.f_code is Recording.__torch_dispatch__.__code__:
        return None
    return types.TracebackType(
        as_from_torch(trace.tb_next), trace.tb_frame, trace.tb_lasti, trace.tb_lineno
    )


class Recording(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls, self.made, self.before = [], set(), {}

    def __torch_dispatch__(self, func, classes, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise RuntimeError("operation not permitted when stream is capturing")
        for t in tensors((args, kwargs)):
            storage = t.untyped_storage()
            if storage.data_ptr() not in self.made and storage.data_ptr() not in self.before:
                self.before[storage.data_ptr()] = storage, storage.clone()
        results = func(*args, **kwargs)
        if func.namespace != "profiler":
            self.calls.append((func, args, kwargs, results))
        for t in tensors(results):
            if t.untyped_storage().data_ptr() not in self.before:
                self.made.add(t.untyped_storage().data_ptr())
        return results

    def undo(self):
        for storage, before in self.before.values():
            storage.copy_(before)

    def play(self):
        with torch.no_grad():
            for func, args, kwargs, results in self.calls:
                again = func(*args, **kwargs)
                if any(r.alias_info is not None for r in func._schema.returns):
                    continue  # a view, or changed in place: its memory is the same
                for old, new in zip(tensors(results), tensors(again), strict=True):
                    old.copy_(new)


class FakeRecorder:
    """A recorder. ``log`` lists what it did, with a + for the second part of a record."""

    def __init__(self, device=None):
        self.log, self.numbers = [], itertools.count()

    def run(self, update):
        self.log.append("run")
        return update()

    def record(self, update):
        number = next(self.numbers)
        self.log.append(f"record {number}")
        generator = torch.get_rng_state()
        parts = []
        with contextlib.ExitStack() as recording:

            def begin():
                recording.close()
                parts.append(recording.enter_context(Recording()))

            try:
                begin()
                reply = update(begin)
            except RuntimeError as error:
                raise error.with_traceback(as_from_torch(error.__traceback__)) from None
            finally:
                recording.close()
                for record in reversed(parts):
                    record.undo()
                torch.set_rng_state(generator)

        def replay_of(n):
            def replay():
                self.log.append(f"replay {number}" + "+" * n)
                parts[n].play()

            return replay

        return [replay_of(n) for n in range(len(parts))], reply
