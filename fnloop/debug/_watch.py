"""What happens within an update: by module, by operator, by line of the user's code."""

from __future__ import annotations

import copy
import dis
import itertools
import math
import random
import sys
import types
from collections import deque
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import attrs
import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from fnloop._core.code import codes_of
from fnloop._core.metrics import Mean
from fnloop._core.selectors import Selectors
from fnloop._core.state import TrainState, unwrap
from fnloop._core.types import Middleware, Output, Step, middleware
from fnloop._extensions.checkpoints.compare import INTEGER_OF_SIZE
from fnloop._extensions.checkpoints.made_with import INSTALLED, PACKAGE, is_users
from fnloop._extensions.checkpoints.named import walk_optimizers
from fnloop.debug._diff import bytes_of
from fnloop.extend import (
    Batch,
    Chosen,
    Metric,
    Ownership,
    checks,
    containers,
    host,
    local_part,
    optimizers,
    parameters,
    refuse,
    report,
    then,
    torch_compat,
)

# --------------------------------------------------------------------------------------------------
# Activations, gradients and updates by module, in some updates.

WATCH = "watch"


@middleware("step")
def watch(every: int = 50, only: Selectors | None = None) -> Middleware:
    """Report activations, gradients and updates by module, at some updates.

    - "watch/<module>/activation": the root mean square of the module's output in training. It is 0
      for a ReLU that is dead, and grows with depth or time where activations explode. It is that of
      modules without children, with parameters or not, and of those with parameters of their own.
    - "watch/<module>/gradient": the norm of the gradient of the module's own parameters. It is that
      of the gradient as it is where ``watch`` is listed: before ``clip``, unscaled, of the whole
      update, if it is listed after ``amp`` and ``accumulate`` and before ``clip``.
    - "watch/<module>/update": the norm of the change of these parameters, divided by their norm
      after it. Often about 1e-3 where training goes well; 0 where nothing is learned.

    Args:
        every: updates from one that is watched to the next.
        only: what it is for, as in ``freeze``: a module of the model, a glob of names, a function
            ``(name, parameter) -> bool``, or a list of these. None: all modules.

    Returns:
        A middleware of the loss, the gradient and the update ring.

    Raises:
        TypeError: every is not an int, or ``only`` is not a selector.
        ValueError: every is below 1. When composing: ``cuda_graph`` is listed too. When a run
            starts: ``only`` is for nothing in the model.
        NotImplementedError: when a run starts: the model is sharded over processes.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step = fl.pipeline(watch())(toy_loss)
        >>> state, out = step(toy(w=2.0), torch.tensor([3.0]))       # w: 2 - 3
        >>> {name: metric.compute() for name, metric in out.metrics.items()}
        {'watch/Toy/activation': 6.0, 'watch/Toy/gradient': 3.0, 'watch/Toy/update': 3.0}

    Notes:
        They are means over the watched updates of a record, of which the first update of the run is
        one. They stay on the device until a record is made. Watched updates have hooks on the
        modules and a copy of the weights. Other updates have neither.

        Nothing is seen inside of what torch.compile has compiled, so there is no activation there.
        A functional call such as ``torch.relu(x)`` has no name: the next module shows what it does.
    """
    every = checks.integer(
        WATCH, "every", every, "updates from one to the next", wrong_type=TypeError
    )
    chosen = None if only is None else Chosen(WATCH, only)

    def is_watched(state: TrainState) -> bool:
        return not (state.step + state.skipped) % every

    def loss(step: Step) -> Step:
        def activations(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if not is_watched(state):
                return step(state, batch)
            found: dict[str, list[Tensor]] = {}
            with noting(_modules(state, chosen).items(), partial(_note_size, found)):
                state, out = step(state, batch)
            means = {name: torch.stack(values).mean() for name, values in found.items()}
            metrics = {name: Mean(value * out.weight, out.weight) for name, value in means.items()}
            return state, report(out, metrics, WATCH)

        return activations

    def gradient(state: TrainState, batch: Batch, out: Output) -> tuple[TrainState, Output]:
        __tracebackhide__ = True
        found = _gradients(_parameters(state, chosen)) if is_watched(state) else {}
        return state, report(out, found, WATCH)

    def update(step: Step) -> Step:
        def updates(state: TrainState, batch: Batch) -> tuple[TrainState, Output]:
            __tracebackhide__ = True
            if not is_watched(state):
                return step(state, batch)
            watched = _parameters(state, chosen)
            before = {name: [p.detach().clone() for p in ps] for name, ps in watched.items()}
            state, out = step(state, batch)
            return state, report(out, _updates(before, watched), WATCH)

        return updates

    return Middleware(
        WATCH,
        loss=loss,
        gradient=then(gradient),
        update=update,
        check_state=lambda state, listed: _check_state(state, chosen),
        adds=(WATCH,),
        traits=("commutes",),
    )


def _gradients(chosen: dict[str, list[Tensor]]) -> dict[str, Metric]:
    """Return the norms of gradients, by the names of their metrics."""
    found = {k: [p.grad for p in params if p.grad is not None] for k, params in chosen.items()}
    return {f"{WATCH}/{k}/gradient": Mean(_norm(grads), 1) for k, grads in found.items() if grads}


def _updates(before: dict[str, list[Tensor]], chosen: dict[str, list[Tensor]]) -> dict[str, Metric]:
    """Return how much parameters have changed, by the names of their metrics."""
    found: dict[str, Metric] = {}
    with torch.no_grad():
        for name, params in chosen.items():
            change = _norm([p - old for p, old in zip(params, before[name], strict=True)])
            ratio = change / _norm(params).clamp_min(torch.finfo(torch.float32).tiny)
            found[f"{WATCH}/{name}/update"] = Mean(ratio, 1)
    return found


def _check_state(state: TrainState, chosen: Chosen | None) -> None:
    """Raise if the model cannot be watched, or the chosen are for nothing in it."""
    why = (
        "computes norms of whole parameters, but this model is sharded over processes: write "
        'grad_norm(by="module") for its gradients'
    )
    refuse(state, WATCH, sharded=why)
    _modules(state, chosen)


def _modules(state: TrainState, chosen: Chosen | None) -> dict[str, nn.Module]:
    """Return the modules whose outputs are watched, by name."""
    model = unwrap(state)
    selected = None if chosen is None else chosen.select(model)
    wanted = None if selected is None else {id(p) for p in selected.parameters.values()}
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        own = [*module.parameters(recurse=False)]
        if not own and any(True for _ in module.children()):
            continue
        if selected is not None and wanted is not None:
            named = module in selected.modules
            if not named and not any(id(p) in wanted for p in own):
                continue
        found[torch_compat.strip_compile_prefix(name) or type(model).__name__] = module
    return found


def _parameters(state: TrainState, chosen: Chosen | None) -> dict[str, list[Tensor]]:
    """Return the parameters that optimizers update, by the name of their module."""
    trained = {id(p) for p in parameters(state)}
    found: dict[str, list[Tensor]] = {}
    for name, module in _modules(state, chosen).items():
        if own := [p for p in module.parameters(recurse=False) if id(p) in trained]:
            found[name] = [*own]
            trained -= {id(p) for p in own}  # tied ones count once
    return found


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    dense = [t.detach() if t.layout is torch.strided else t.detach().to_dense() for t in tensors]
    norms = [torch.linalg.vector_norm(t, dtype=_wide_dtype(t.dtype)) for t in dense]
    return torch.linalg.vector_norm(torch.stack(norms)) if len(norms) > 1 else norms[0]


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def noting(
    modules: Iterable[tuple[str, nn.Module]], note: Callable[[str, nn.Module, object], None]
) -> Iterator[None]:
    """Call a function with each call of modules in a ``with`` block: name, module and output."""
    with ExitStack() as stack:
        for name, module in modules:
            noted = lambda module, given, output, name=name: note(name, module, output)
            stack.callback(module.register_forward_hook(noted).remove)
        yield


def _note_size(
    found: dict[str, list[Tensor]], name: str, module: nn.Module, output: object
) -> None:
    """Note the root mean square of an output, by the name of its metric."""
    if torch.compiler.is_compiling():
        return  # what it adds here would become a part of the compiled code
    first = output[0] if isinstance(output, tuple) and output else output
    if isinstance(first, Tensor) and first.is_floating_point() and first.numel():
        norm = torch.linalg.vector_norm(first.detach(), dtype=_wide_dtype(first.dtype))
        sizes = found.setdefault(f"{WATCH}/{name}/activation", [])
        sizes.append(norm / math.sqrt(first.numel()))


# --------------------------------------------------------------------------------------------------
# The operators of an update, each with a checksum of its results.

_OUTSIDE = "in none of your lines: in backward, in the optimizer or in a library"
# Memory that nothing was written to yet has any content.
_UNWRITTEN = ("empty", "resize", "set_")


@attrs.frozen(eq=False)
class Called:
    """A call of an operator.

    Args:
        operator: its name.
        line: the line of the user that called it; "" in backward and in the optimizer.
        checksum: of its results, on the device; or what it read to the host.
    """

    operator: str
    line: str
    checksum: object

    def __str__(self) -> str:
        where = f"at {self.line}" if self.line else _OUTSIDE
        return f"The first operator whose result differs is {self.operator}, {where}"


class Trace(torch_compat.Operators):
    """Notes every operator that runs in a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def see(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        results = func(*args, **kwargs)
        name = str(func)
        if torch_compat.computes(func) and not any(part in name for part in _UNWRITTEN):
            self.calls.append(Called(name, running_line(sys._getframe(2)), _checksum(results)))
        return results


def _checksum(results: object) -> object:
    if not isinstance(results, Tensor | list | tuple):
        return results
    found = [t for t in containers.tensors_in(results) if t.layout is torch.strided and t.numel()]
    sums = [as_integers(t).sum(dtype=torch.int64) for t in found]
    return torch.stack([one.to(sums[0].device) for one in sums]) if sums else None


def first_other_operator(a: Trace, b: Trace) -> Called | None:
    """Return the first operator whose results, or which itself, is not the same in both."""
    for one, other in zip(a.calls, b.calls, strict=False):
        if one.operator != other.operator or one.line != other.line:
            return other
        x, y = one.checksum, other.checksum
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            same = torch.equal(x, y)
        else:
            same = x == y or (x != x and y != y)
        if not same:
            return other
    shorter = min(len(a.calls), len(b.calls))
    left = [*a.calls[shorter:], *b.calls[shorter:]]
    return left[0] if left else None


# --------------------------------------------------------------------------------------------------
# The results of an update, and where those of two updates differ in a bit.

LOSS, GRADIENT, WEIGHT, BUFFER, OPTIMIZER, SLOT = (
    *("loss", "gradient", "weight", "buffer", "optimizer", "slot"),
)


ORDER = (LOSS, BUFFER, GRADIENT, WEIGHT, OPTIMIZER, SLOT)
OF_PARAMETERS = (GRADIENT, WEIGHT, OPTIMIZER)


@attrs.frozen(eq=False)
class Part:
    """A tensor of a result.

    Args:
        kind: "loss", "gradient", "buffer", "weight", "optimizer" or "slot".
        name: the name of the parameter or the buffer; of a slot, its name.
        inside: what it is of the parameter or the slot, such as "exp_avg"; or "".
        value: the tensor.
    """

    kind: str
    name: str
    inside: str
    value: Tensor


Result = list[Part]


@attrs.frozen
class Difference:
    """A tensor in which two results differ.

    Args:
        kind, name, inside: as in :class:`Part`.
        elements: how many elements differ.
        size: how many it has.
        most: the largest difference; NaN if there is none that is finite.
        bits: how many bits differ in all.
        values: the loss in both, or None.
    """

    kind: str
    name: str
    inside: str
    elements: int
    size: int
    most: float
    bits: int
    values: tuple[float, float] | None = None


@attrs.frozen
class Differences:
    """Where two results differ.

    Args:
        first: the first difference, in the order in which an update makes its results.
        parameter: that of the first parameter whose gradient, value or optimizer state differs.
        parameters: how many parameters differ.
        gradients: whether the gradients were compared.
    """

    first: Difference
    parameter: Difference | None
    parameters: int
    gradients: bool = False


class Gradients:
    """Copies of the gradients, as each optimizer sees them before its step, by ids of parameters.

    Of an optimizer that computes them itself, with a closure, they are those after its step.

    Args:
        state: the state.
    """

    def __init__(self, state: TrainState) -> None:
        self._optimizers = [*optimizers(state).values()]
        self._seen = False
        self.found: dict[int, Tensor] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Gradients:
        for one in self._optimizers:
            self._handles.append(one.register_step_pre_hook(partial(self._note, True)))
            self._handles.append(one.register_step_post_hook(partial(self._note, False)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, before: bool, optimizer: Optimizer, *_: object) -> None:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = {id(p): local_part(p.grad.detach()) for p in params if p.grad is not None}
        if before:
            self._seen = bool(grads)
        if before or not self._seen:
            self.found |= zip(grads, clone_all([*grads.values()]), strict=True)


def result_of(state: TrainState, out: Output, gradients: Gradients | None, copied: bool) -> Result:
    """Return what an update has made.

    Args:
        state: the state after it.
        out: its output.
        gradients: those that its optimizers saw; None if they are not known.
        copied: whether to copy the tensors, because another update will follow.
    """
    found = gradients.found if gradients is not None else {}
    named = dict(named_tensors(state))
    names = {id(tensor): name for name, tensor in named.items()}
    buffers = {id(b) for b in state.model.buffers()}
    parts = [Part(LOSS, "loss", "", out.loss)]
    parts += [Part(BUFFER, name, "", t) for name, t in named.items() if id(t) in buffers]
    grads = [Part(GRADIENT, names[i], "", _dense(g)) for i, g in found.items() if i in names]
    weights = [Part(WEIGHT, name, "", t) for name, t in named.items() if id(t) not in buffers]
    parts += weights
    for optimizer in optimizers(state).values():
        for key, held in optimizer.state.items():
            name = names.get(id(key), "")
            parts += [Part(OPTIMIZER, name, k, t) for k, t in tensors_of(held)]
    for slot, held in state.slots.items():
        parts += [Part(SLOT, slot, k, t) for k, t in tensors_of(held)]
    taken = [_dense(part.value) for part in parts]
    taken = clone_all(taken) if copied else taken
    result = [Part(p.kind, p.name, p.inside, t) for p, t in zip(parts, taken, strict=True)]
    return sorted([*result, *grads], key=lambda part: ORDER.index(part.kind))


def without_gradients(result: Result) -> Result:
    """Return what is in a result besides the gradients."""
    return [part for part in result if part.kind != GRADIENT]


def _dense(tensor: Tensor) -> Tensor:
    local = local_part(tensor.detach())
    return local if local.layout is torch.strided else local.to_dense()


# --- comparison


def as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers, in one dimension."""
    flat = tensor.detach().contiguous()
    flat = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1)
    return flat.view(INTEGER_OF_SIZE[flat.dtype.itemsize])


def find_differences(a: Result, b: Result) -> Differences | None:
    """Return where two results differ in a bit; None if nowhere."""
    labels = [[(p.kind, p.name, p.inside, p.value.shape, p.value.dtype) for p in r] for r in (a, b)]
    if labels[0] != labels[1]:
        odd = next(
            (p for p in [*a, *b] if _label(p) not in labels[0] or _label(p) not in labels[1]), a[0]
        )
        found = Difference(odd.kind, odd.name, odd.inside, 0, 0, math.nan, 0)
        return Differences(found, found if odd.kind in OF_PARAMETERS else None, 1)
    if _all_equal(a, b):
        return None
    flags = [
        (as_integers(x.value) != as_integers(y.value)).any() for x, y in zip(a, b, strict=True)
    ]
    differ = [bool(flag) for flag in flags]
    pairs = [(x, y) for x, y, flag in zip(a, b, differ, strict=True) if flag]
    of_parameters = [(x, y) for x, y in pairs if x.kind in OF_PARAMETERS]
    parameter = _describe(*of_parameters[0]) if of_parameters else None
    differing = len({x.name for x, _ in of_parameters})
    compared = any(part.kind == GRADIENT for part in a)
    return Differences(_describe(*pairs[0]), parameter, differing, compared)


def _all_equal(a: Result, b: Result) -> bool:
    """Return whether two results have the same bits, with one read from a device."""
    pairs = [(as_integers(x.value), as_integers(y.value)) for x, y in zip(a, b, strict=True)]
    if all(x.device.type == "cpu" for x, _ in pairs):
        return all(torch.equal(x, y) for x, y in pairs)
    device = pairs[0][0].device
    differ = [(x != y).any().to(device) for x, y in pairs]
    return not bool(torch.stack(differ).any())


def _label(part: Part) -> tuple[object, ...]:
    return part.kind, part.name, part.inside, part.value.shape, part.value.dtype


def _describe(one: Part, other: Part) -> Difference:
    x, y = as_integers(one.value), as_integers(other.value)
    gap = (_wide(one.value) - _wide(other.value)).abs().nan_to_num(-1.0, -1.0, -1.0)
    most = float(gap.max())
    values = (float(one.value), float(other.value)) if one.kind == LOSS else None
    return Difference(
        one.kind, one.name, one.inside, int((x != y).sum()), x.numel(),
        most if most >= 0 else math.nan, _bits(x ^ y), values,
    )  # fmt: skip


def _wide(tensor: Tensor) -> Tensor:
    wide = torch.float32 if tensor.device.type == "mps" else torch.float64
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).detach().to(wide)


def _bits(differing: Tensor) -> int:
    """Return how many bits of integers are set."""
    octets = differing.view(torch.uint8)
    return sum(int((octets >> i & 1).sum()) for i in range(8))


# --------------------------------------------------------------------------------------------------
# A copy of all that an update changes, and how to put it back in place.
#
# The model, the optimizers and the slots stay the same objects, and so do their tensors where they
# fit. So compiled code and CUDA graphs, which keep addresses, see nothing of it.

_PLAIN = (bool, int, float, str, bytes, type(None))


class Before:
    """A state before an update: what the update will change, and the random draws.

    Args:
        state: the state, which must stay referenced.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        named = dict(named_tensors(state))
        wrapped = [o for one in optimizers(state).values() for o in walk_optimizers(one)]
        # What copies refer to and do not copy.
        live = (state.model, *wrapped, *named.values())
        self._live: dict[int, object] = {id(one): one for one in live}
        self._tensors = dict(zip(named, clone_all([*map(local_part, named.values())]), strict=True))
        # Tensors are copied together: a deep copy of each takes many times as long.
        inside = [t for one in wrapped for held in one.state.values() for _, t in tensors_of(held)]
        inside += [t for _, t in tensors_of(state.slots)]
        inside = [t for t in inside if id(t) not in self._live]
        memo = self._live | dict(zip(map(id, inside), clone_all(inside), strict=True))
        self._optimizers = [_OptimizerBefore(one, memo) for one in wrapped]
        self._slots = {name: copy.deepcopy(slot, memo) for name, slot in state.slots.items()}
        self._begin_again = host().mark(state)

    def put_back(self) -> None:
        """Put everything back. The state owns the model again, and draws what it drew before."""
        state = self._state
        with torch.no_grad():
            named = dict(named_tensors(state))
            putting = _Putting(self._live)
            for name, saved in self._tensors.items():
                putting.fill(local_part(named[name].detach()), named[name], saved)
            for one in self._optimizers:
                one.put_back(putting.put)
            for name, saved in self._slots.items():
                putting.put(state.slots[name], saved)
            putting.finish()
        Ownership.give_back(state)
        self._begin_again()


class _OptimizerBefore:
    """What an optimizer held before an update."""

    def __init__(self, optimizer: Optimizer, memo: dict[int, object]) -> None:
        self.optimizer = optimizer
        self.state = {key: copy.deepcopy(held, memo) for key, held in optimizer.state.items()}
        settings = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        self.groups = copy.deepcopy(settings, memo)
        self.numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, _PLAIN)}

    def put_back(self, put: Callable[[object, object], object]) -> None:
        state = self.optimizer.state
        for key in [key for key in state if key not in self.state]:
            del state[key]
        for key, saved in self.state.items():
            state[key] = put(state.get(key), saved)
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            for name in [name for name in group if name != "params" and name not in settings]:
                del group[name]
            for name, saved in settings.items():
                group[name] = put(group.get(name), saved)
        vars(self.optimizer).update(self.numbers)


def clone_all(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, with one operator for all that are alike."""
    with torch.no_grad():
        found = [t.detach() for t in tensors]
        strided = [t.layout is torch.strided for t in found]
        copies = [
            torch.empty_like(t) if dense else t.clone()
            for t, dense in zip(found, strided, strict=True)
        ]
        pairs = [(a, b) for a, b, d in zip(copies, found, strided, strict=True) if d]
        _copy_all(pairs)
    return copies


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of each pair into the first."""
    if pairs:
        torch_compat.foreach_copy_([a for a, _ in pairs], [b for _, b in pairs])


def tensors_of(value: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in a nested value, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if (parts := containers.parts_of(value)) is None and attrs.has(type(value)):
        parts = attrs.asdict(value, recurse=False).items()
    for key, part in parts or ():
        if not isinstance(part, _PLAIN):
            yield from tensors_of(part, f"{path}.{key}" if path else str(key))


def named_tensors(state: TrainState) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers of a model, each with its name."""
    yield from state.model.named_parameters()
    yield from state.model.named_buffers()
    known = {id(p) for p in state.model.parameters()}
    for optimizer in optimizers(state).values():
        for i, group in enumerate(optimizer.param_groups):
            for j, p in enumerate(group["params"]):
                if id(p) not in known:
                    known.add(id(p))
                    yield f"(group {i}, parameter {j}, not in the model)", p


class _Putting:
    """Puts saved values back, in the objects that are there now where they fit.

    Args:
        live: what copies refer to and do not copy.
    """

    def __init__(self, live: dict[int, object]) -> None:
        self._live = live
        self._done: dict[int, object] = {}  # they stay referenced, and so keep their ids
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def finish(self) -> None:
        """Copy all tensors."""
        _copy_all(self._pairs)

    def fill(self, local: Tensor, whole: Tensor, saved: Tensor) -> None:
        """Give a tensor of the model its value."""
        if _kind(local) == _kind(saved):
            self._pairs.append((local, saved))
        else:  # a buffer that the forward has replaced by one of another size
            whole.data = saved.clone()

    def put(self, now: object, saved: object) -> object:
        """Return a saved value."""
        if isinstance(saved, _PLAIN):
            return saved
        if now is saved or id(now) in self._done:
            return now
        if type(now) is not type(saved):
            return self._copied(saved)
        if isinstance(now, Tensor) and isinstance(saved, Tensor):
            if _kind(now) != _kind(saved) or now.layout is not torch.strided:
                return saved.clone()
            self._pairs.append((local_part(now.detach()), local_part(saved)))
            return now
        self._done[id(now)] = now
        return self._put_inside(now, saved)

    def _put_inside(self, now: object, saved: object) -> object:
        if isinstance(now, MutableMapping) and isinstance(saved, MutableMapping):
            values = {key: self.put(now.get(key), part) for key, part in saved.items()}
            now.clear()
            now.update(values)
        elif isinstance(now, list | deque) and isinstance(saved, list | deque):
            held = [*now, *(None for _ in saved)]
            values = [self.put(a, b) for a, b in zip(held, saved, strict=False)]
            now.clear()
            now.extend(values)
        elif isinstance(now, tuple) and isinstance(saved, tuple) and len(now) == len(saved):
            parts = [self.put(a, b) for a, b in zip(now, saved, strict=True)]
            return containers.with_parts(now, parts)
        elif not _names_of(now):
            return self._copied(saved)
        for name in _names_of(saved):
            value = self.put(getattr(now, name, None), getattr(saved, name))
            object.__setattr__(now, name, value)
        return now

    def _copied(self, saved: object) -> object:
        return copy.deepcopy(saved, dict(self._live))


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _names_of(value: object) -> list[str]:
    """Return the names of what an object holds: its attributes, or the fields of attrs."""
    if containers.parts_of(value) is None and attrs.has(kind := type(value)):
        return [field.name for field in attrs.fields(kind)]
    return [*containers.vars_of(value)]


# --------------------------------------------------------------------------------------------------
# Lines of the user's code: which one changes a name, and which one is running.

_STORES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF")
_LOADS = ("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_METHOD", "LOAD_DEREF")


def find_line(codes: Sequence[types.CodeType], name: str) -> str:
    """Return the first line that changes a name, or else one that uses it; "" if there is none."""
    for opnames in (_STORES, _LOADS):
        for code in codes:
            if code.co_name == "__init__":
                continue
            for instruction in dis.get_instructions(code):
                place = instruction.positions
                if (
                    instruction.opname in opnames
                    and instruction.argval == name
                    and place is not None
                    and place.lineno is not None
                ):
                    return describe_line(code, place.lineno)
    return ""


def describe_line(code: types.CodeType, line: int) -> str:
    """Return a line as text: the file, the number and the function."""
    return f"{Path(code.co_filename).name}, line {line}, in {code.co_name}"


def running_line(frame: types.FrameType | None) -> str:
    """Return the line of the user that is running; "" if that is fnloop alone, as in backward."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE) and "/debug/" not in code.co_filename:
            return ""
        inside = "/torch/" in code.co_filename or code.co_filename.startswith((PACKAGE, "<"))
        if not inside:
            return describe_line(code, frame.f_lineno)
        frame = frame.f_back
    return ""


# --------------------------------------------------------------------------------------------------
# What code can change besides a state: counters, generators and attributes that it can reach.
#
# They are found by walking from functions to what they refer to, closures, globals and attributes,
# and from objects to what they hold. What belongs to installed packages is not walked into, except
# loaders and modules of torch.

MOST_OBJECTS, MOST_ITEMS, MOST_BYTES = 50_000, 1_000, 1 << 22
_IMMUTABLE = (bool, int, float, complex, str, bytes, type(None))
_WALKED = ("torch.nn", "torch.utils.data", "fnloop", "toolz", "functools")
_GENERATED = ("<frozen", "<attrs", "<string")  # code without a file


@attrs.frozen(eq=False)
class Source:
    """A value that code can change.

    Args:
        name: where it is: "the global calls of train.py", "the train loader.dataset.calls".
        kind: what it is, such as "torch.Generator"; "" for plain data.
        fingerprint: what its value was.
        put_back: gives it the value that it had.
        line: where code changes it, or uses it; or "".
    """

    name: str
    kind: str
    fingerprint: Hashable
    put_back: Callable[[], object]
    line: Callable[[], str]

    def __str__(self) -> str:
        kind, line = self.kind and f", a {self.kind}", self.line()
        return f"{self.name}{kind}{line and f' ({line})'}"


def find_sources(roots: Mapping[str, object]) -> dict[str, Source]:
    """Return the values that can be reached from some objects, by where they are.

    Args:
        roots: the objects, by what they are called.
    """
    walk = _Walk()
    for name, root in roots.items():
        walk.visit(name, root, None, quiet=False)
    return walk.found


def find_changed(before: Mapping[str, Source], roots: Mapping[str, object]) -> list[Source]:
    """Return which values that were found before are others now."""
    now = find_sources(roots)
    both = (source for name, source in before.items() if name in now)
    return [source for source in both if now[source.name].fingerprint != source.fingerprint]


class _Walk:
    """A walk over objects. ``found`` are the values that it has come to."""

    def __init__(self) -> None:
        self.found: dict[str, Source] = {}
        self._seen: dict[int, object] = {}  # the objects stay referenced, and so keep their ids
        self._codes: list[types.CodeType] = []

    def visit(
        self, name: str, value: object, put: Callable[[object], object] | None, quiet: bool
    ) -> None:
        """Walk into a value.

        Args:
            name: where it is.
            value: the value.
            put: puts another one into its place; None if nothing can.
            quiet: whether it belongs to fnloop, which knows what it keeps.
        """
        if isinstance(value, _IMMUTABLE):
            if not quiet and put is not None:
                self._note(name, "", (type(value), value), lambda: put(value))
            return
        if id(value) in self._seen or len(self._seen) > MOST_OBJECTS:
            return
        self._seen[id(value)] = value
        if not quiet and (known := _state_of(value, put)) is not None:
            self._note(name, *known)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.visit(name, value.__self__, None, quiet)
            self.visit(name, value.__func__, None, quiet)
        elif isinstance(value, dict | list | tuple | set | deque):
            self._container(name, value, quiet)
        elif isinstance(value, type):
            self._class(value)
        elif not isinstance(value, Optimizer | types.ModuleType | Tensor):
            self._object(name, value)

    def _note(
        self, name: str, kind: str, fingerprint: Hashable, put_back: Callable[[], object]
    ) -> None:
        codes, word = self._codes, name.rpartition(".")[2]
        for before, after in (("the global ", " of "), ("", " in the closure of ")):
            if name.startswith(before) and after in name:
                word = name.removeprefix(before).partition(after)[0]
        word = word.partition("[")[0]
        line = partial(find_line, codes, word)
        self.found.setdefault(name, Source(name, kind, fingerprint, put_back, line))

    def _function(self, function: types.FunctionType) -> None:
        written_in = function.__code__.co_filename
        ours = written_in.startswith(PACKAGE)
        if not written_in.startswith((*INSTALLED, PACKAGE, *_GENERATED)):
            self._codes += codes_of(function.__code__)
            file = Path(function.__code__.co_filename).name
            names = {name for code in codes_of(function.__code__) for name in code.co_names}
            scope = function.__globals__
            for key in sorted(names & scope.keys()):
                self._global(f"the global {key} of {file}", key, scope, names)
        called = function.__qualname__.replace("<locals>.", "")
        closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
        for key, cell in closure:
            try:
                held = cell.cell_contents
            except ValueError:  # it is not filled yet
                continue
            put = partial(setattr, cell, "cell_contents")
            self.visit(f"{key} in the closure of {called}", held, put, quiet=ours)
        inside = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for i, held in enumerate((*inside, *vars(function).values())):
            self.visit(f"default {i} of {called}", held, None, quiet=ours)

    def _global(self, name: str, key: str, scope: dict[str, object], used: Iterable[str]) -> None:
        value = scope[key]
        if isinstance(value, types.ModuleType):
            if is_users(value.__name__):
                for inner in sorted({*used} & vars(value).keys()):
                    put = partial(vars(value).__setitem__, inner)
                    where = f"the global {inner} of {value.__name__}"
                    self.visit(where, vars(value)[inner], put, quiet=False)
            return
        self.visit(name, value, partial(scope.__setitem__, key), quiet=False)

    def _container(self, name: str, value: object, quiet: bool) -> None:
        assert isinstance(value, dict | list | tuple | set | deque)
        if not quiet and not isinstance(value, tuple):
            kept = copy.copy(value)
            fingerprint = (type(value), len(value))
            self._note(name, type(value).__name__, fingerprint, partial(_refill, value, kept))
        if len(value) > MOST_ITEMS:
            return
        if isinstance(value, dict):
            for key, part in list(value.items()):
                put = partial(value.__setitem__, key)
                self.visit(f"{name}[{key!r}]", part, put, quiet)
            return
        for i, part in enumerate(list(value)):
            put = partial(value.__setitem__, i) if isinstance(value, list | deque) else None
            self.visit(f"{name}[{i}]", part, put, quiet)

    def _class(self, kind: type) -> None:
        if not is_users(kind.__module__):
            return
        for key, value in list(vars(kind).items()):
            if isinstance(value, types.FunctionType):
                self._codes += codes_of(value.__code__)
                self.visit(f"{kind.__name__}.{key}", value, None, quiet=False)
            elif not key.startswith("__"):
                self.visit(f"{kind.__name__}.{key}", value, partial(setattr, kind, key), False)

    def _object(self, name: str, value: object) -> None:
        kind = type(value)
        module = kind.__module__ or ""
        if not (is_users(module) or module.startswith(_WALKED)):
            return
        for base in kind.__mro__:
            self.visit(base.__name__, base, None, quiet=False)
        ours = module.startswith("fnloop.")
        left_out: set[str] = set()
        if isinstance(value, nn.Module):
            left_out = vars(nn.Module()).keys() - {"training"}  # parameters, buffers, hooks
            for part, child in value.named_children():
                self.visit(f"{name}.{part}", child, None, quiet=ours)
        for key, held in containers.attributes_of(value):
            if key not in left_out and not (key.startswith("_") and module.startswith("torch")):
                put = partial(object.__setattr__, value, key)
                self.visit(f"{name}.{key}", held, put, quiet=ours)


def _state_of(
    value: object, put: Callable[[object], object] | None
) -> tuple[str, Hashable, Callable[[], object]] | None:
    """Return what a generator, an array or a counter is, its value, and what puts it back."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return "torch.Generator", state.numpy().tobytes(), partial(value.set_state, state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return "random.Random", value.getstate(), partial(value.setstate, value.getstate())
    if isinstance(value, np.random.RandomState):
        held = value.get_state(legacy=True)
        return "numpy RandomState", repr(held), partial(value.set_state, held)
    if isinstance(value, np.random.Generator):
        kept = copy.deepcopy(value.bit_generator.state)
        restore = partial(setattr, value.bit_generator, "state", kept)
        return "numpy Generator", repr(kept), restore
    if isinstance(value, np.ndarray) and value.nbytes <= MOST_BYTES and not value.dtype.hasobject:
        return "array", value.tobytes(), partial(np.copyto, value, value.copy())
    if isinstance(value, Tensor) and not value.requires_grad and value.layout is torch.strided:
        if value.numel() * value.element_size() > MOST_BYTES:
            return None
        kept = value.detach().clone()
        return "tensor", bytes(bytes_of(kept)), lambda: value.detach().copy_(kept)
    if isinstance(value, itertools.count) and put is not None:
        again = copy.copy(value)
        return "itertools.count", repr(value), lambda: put(again)
    return None


def _refill(value: object, kept: object) -> None:
    """Give a container what it held."""
    assert isinstance(value, dict | list | set | deque)
    value.clear()
    fill = value.extend if isinstance(value, list | deque) else value.update
    fill(kept)  # type: ignore[arg-type]
