"""What torch does not document, as far as the kernel or several extensions use it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from fnloop._display.checks import has_methods

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# CI runs them on torch 2.11.0, 2.13.0 and 2.15.0. Each has a guard. Where a name is missing there
# is a fallback, or an error that says what to do where continuing would be unsafe. `import fnloop`
# depends on none of them.

CHECKED = "2.11 to 2.15"
_log = logging.getLogger("fnloop")
Item = TypeVar("Item")
COMPILED = "_orig_mod"  # the attribute of torch.compile's wrapper that is the module


def missing(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {name}, which fnloop needs {why}. Install torch "
        f"{CHECKED}, or a newer fnloop"
    )


def required(owner: object, name: str, known_as: str, why: str) -> Any:
    """Return what is needed of torch under a name. Raise RuntimeError if there is no such name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise missing(known_as, why) from None


def found(owner: object, name: str, fallback: Item) -> Item:
    """Return what this version of torch may lack, such as a function, or the fallback."""
    return getattr(owner, name, fallback)


# --- optimizers

# The names in torch's wrapper around ``Optimizer.step``. A wrapper with others is not skipped.
_WRAPPER_USES = {
    *("cast", "Optimizer", "__class__", "__name__", "torch", "autograd", "profiler"),
    *("record_function", "chain", "values", "isinstance", "tuple", "len", "RuntimeError"),
    *("_global_optimizer_pre_hooks", "_optimizer_step_pre_hooks", "_optimizer_step_code"),
    *("_optimizer_step_post_hooks", "_global_optimizer_post_hooks"),
}


def _find_wrapper() -> object:
    wrap = getattr(Optimizer, "profile_hook_step", None)
    code = getattr(wrap(lambda: None), "__code__", None) if wrap is not None else None
    return code if code is not None and _WRAPPER_USES.issuperset(code.co_names) else object()


STEP_WRAPPER = _find_wrapper()
_optim = sys.modules[Optimizer.__module__]
_pre_hooks = found(_optim, "_global_optimizer_pre_hooks", True)
_post_hooks = found(_optim, "_global_optimizer_post_hooks", True)
_profiler_enabled = found(torch.autograd, "_profiler_enabled", lambda: True)


def apply_optimizer(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()`` without torch's wrapper, where the wrapper would do nothing.

    The wrapper marks the step for a profiler and calls hooks: 5 µs, even with neither. It is called
    if one of the names is missing that tell whether it has anything to do.
    """
    __tracebackhide__ = True
    step = type(optimizer).step
    bare = getattr(step, "__wrapped__", None)
    if (
        bare is None
        or getattr(step, "__code__", None) is not STEP_WRAPPER
        or has_step_hooks(optimizer)
        or _profiler_enabled()
    ):
        optimizer.step()
    else:
        groups = _in_few_calls(optimizer)
        try:
            for group in groups:
                group["foreach"] = True
            bare(optimizer)
        finally:
            for group in groups:
                group["foreach"] = None


# --- tensors


def _foreach(name: str) -> Callable[..., object]:
    """Return an operation on a list of tensors. Fallback: one tensor after the other."""

    def one_by_one(tensors: Sequence[Tensor], other: object, **options: object) -> None:
        others = other if isinstance(other, list) else [other] * len(tensors)
        for tensor, value in zip(tensors, others, strict=True):
            operator.methodcaller(name, value, **options)(tensor)

    return found(torch, f"_foreach_{name}", one_by_one)


def _unscale_one_by_one(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    for grad in grads:
        found.logical_or_(~torch.isfinite(grad).all())
        grad.mul_(inverse)


foreach_add_ = _foreach("add_")
foreach_clamp_max_ = _foreach("clamp_max_")
foreach_clamp_min_ = _foreach("clamp_min_")
foreach_copy_ = _foreach("copy_")
foreach_div_ = _foreach("div_")
foreach_mul_ = _foreach("mul_")
foreach_norm: Callable[..., Sequence[Tensor]] = found(
    torch,
    "_foreach_norm",
    lambda tensors, norm_type=2.0: [torch.linalg.vector_norm(t, norm_type) for t in tensors],
)
unscale_: Callable[[Sequence[Tensor], Tensor, Tensor], object] = found(  # as GradScaler does
    torch, "_amp_foreach_non_finite_check_and_unscale_", _unscale_one_by_one
)


def _lerp_one_by_one(
    tensors: Sequence[Tensor], ends: Sequence[Tensor], weight: float | Sequence[Tensor]
) -> None:
    weights = [weight] * len(tensors) if isinstance(weight, int | float) else weight
    for tensor, end, each in zip(tensors, ends, weights, strict=True):
        tensor.lerp_(end, each)


# The weight: a number, or a list with a tensor for each.
foreach_lerp_: Callable[[Sequence[Tensor], Sequence[Tensor], float | Sequence[Tensor]], object]
foreach_lerp_ = found(torch, "_foreach_lerp_", _lerp_one_by_one)


def sparse_values(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient, in its memory. Fallback: it must be coalesced."""
    return grad._values() if hasattr(grad, "_values") else grad.values()


def cpu_capabilities() -> Mapping[str, object]:
    """Return the instruction sets of this CPU, by name. Fallback: none is known."""
    return found(torch.cpu, "get_capabilities", dict)()


def base_of(view: Tensor) -> Tensor | None:
    """Return the tensor that a view was made of; None if it is not a view, or cannot be known."""
    return getattr(view, "_base", None)


def version_of(tensor: Tensor) -> int:
    """Return a number that changes when a tensor is written to. Fallback: a checksum of it."""
    version = getattr(tensor, "_version", None)
    if version is None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        version = zlib.crc32(flat.view(torch.uint8).numpy().tobytes())
    return version


def versions_of(values: Sequence[object]) -> list[int | None]:
    """Return the numbers of :func:`version_of`; None where there is none, as of an array."""
    try:
        return [value._version for value in values]  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return [
            version_of(value) if isinstance(value, Tensor) and not value.is_inference() else None
            for value in values
        ]


def local_tensor(tensor: DTensor) -> Tensor:
    """Return this process's part of a DTensor, in its memory. Fallback: the public method."""
    local = getattr(tensor, "_local_tensor", None)
    if local is None:
        with torch.no_grad():  # so that no autograd node is made
            local = tensor.to_local()
    return local


def seeder_of(index: int) -> Callable[[int], object]:
    """Return what seeds the generator of a CUDA device. Fallback: it seeds those of all devices."""
    generators = getattr(torch.cuda, "default_generators", None)
    return generators[index].manual_seed if generators else torch.cuda.manual_seed_all


# --- operators


class _NoDispatchMode:
    """Stands for torch's class: it can be derived from, and raises when it is entered."""

    def __enter__(self) -> None:
        raise missing("TorchDispatchMode", "to watch which operators run")

    def __exit__(self, *_: object) -> None: ...


DispatchMode: Any = _NoDispatchMode
with contextlib.suppress(ImportError):
    from torch.utils._python_dispatch import TorchDispatchMode

    DispatchMode = TorchDispatchMode


class Operators(DispatchMode):
    """Sees every operator that runs in a ``with`` block."""

    def see(self, func: Callable[..., object], *args: object, **kwargs: object) -> object:
        """Run an operator, and return its results."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence = (),
        kwargs: Mapping | None = None,
    ) -> object:
        return self.see(func, *args, **(kwargs or {}))


def computes(func: object) -> bool:
    """Return whether an operator is neither a view nor the profiler's. Fallback: it is not."""
    schema = getattr(func, "_schema", None)
    view = schema and all(r.alias_info for r in schema.returns) and not schema.is_mutable
    return not view and not is_of_profiler(func)


def is_of_profiler(func: object) -> bool:
    """Return whether an operator marks something for a profiler."""
    return getattr(func, "namespace", None) == "profiler"


def reads_to_host(func: object) -> bool:
    """Return whether an operator reads a tensor to the host."""
    return str(func) == "aten._local_scalar_dense.default"


# --- modules


def draws_by_inductor() -> bool:
    """Return whether compiled code draws other random numbers than eager code. Fallback: it does.

    That is what Inductor does unless ``fallback_random`` is set.
    """
    config = sys.modules.get("torch._inductor.config")
    return config is not None and not getattr(config, "fallback_random", False)


def uncompiled(model: nn.Module) -> nn.Module | None:
    """Return the module in torch.compile's wrapper, or None. Fallback: it stays wrapped."""
    inner = getattr(model, COMPILED, None)
    return inner if isinstance(inner, nn.Module) else None


_batch_norm: type[nn.BatchNorm1d] = found(  # fallback: the class for vectors
    nn.modules.batchnorm, "_BatchNorm", nn.BatchNorm1d
)


def batch_norms(model: nn.Module) -> list[nn.BatchNorm1d]:
    """Return the BatchNorms of a model that keep running statistics."""
    norms = [module for module in model.modules() if isinstance(module, _batch_norm)]
    return [norm for norm in norms if norm.track_running_stats]


def strip_compile_prefix(name: str) -> str:
    """Return a name in a model without the prefixes that torch.compile adds."""
    return name.replace(f"{COMPILED}.", "").removesuffix(COMPILED).rstrip(".")


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of buffers. Fallback: a copy."""
    own = vars(module).get("_buffers")
    return dict(module.named_buffers(recurse=False)) if own is None else own


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether something else is called around an optimizer's step, or in its place."""
    return bool(
        "step" in vars(optimizer)  # patched, as torch's schedulers do
        or calls_hooks(optimizer)
    )


def calls_hooks(optimizer: Optimizer) -> object:
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or _pre_hooks
        or _post_hooks
    )


# --- data loaders


def set_worker_dataset(info: object, dataset: object) -> None:
    """Replace the data set in ``get_worker_info()``. Fallback: a warning."""
    try:
        object.__setattr__(info, "dataset", dataset)
    except (AttributeError, TypeError):
        _log.warning("get_worker_info().dataset is a wrapper in torch %s", torch.__version__)


def make_killable(batches: Iterator[Item]) -> Iterator[Item]:
    """Make ``terminate`` kill the workers of an iterator, and return the iterator.

    The workers ignore their first SIGTERM. Nothing raises when one is killed on purpose, such as a
    persistent one as Python exits. Fallback: a worker that torch has to terminate outlives the
    first attempt.
    """
    for worker in getattr(batches, "_workers", ()):
        process = getattr(worker, "_popen", None)
        if has_methods(process, "terminate", "kill"):
            process.terminate = functools.partial(_kill, weakref.ref(batches), process.kill)
    return batches


def _kill(iterator: Callable[[], Any], kill: Callable[[], object]) -> None:
    """Kill a worker of an iterator, whose workers torch does not watch any more from here on."""
    if getattr(batches := iterator(), "_worker_pids_set", False):
        batches._worker_pids_set = False
        with contextlib.suppress(AttributeError, ValueError):
            torch._C._remove_worker_pids(id(batches))
    kill()


def forget_workers(loader: DataLoader[object]) -> None:
    """Make the next iterator of a DataLoader start its workers again, even persistent ones."""
    if loader.persistent_workers:
        why = "to restart persistent workers: leave them out"
        required(loader, "_iterator", "DataLoader._iterator", why)
    loader._iterator = None


# --------------------------------------------------------------------------------------------------
# Optimizers on the CPU, in fewer calls of torch where that is faster and has the same bits.
#
# An optimizer whose `foreach` is None leaves it to torch how its parameters are updated. On the CPU
# torch makes a dozen calls for each. `foreach=True` makes the same calculations with one call for
# all parameters. Parameters of a few thousand elements take less time so; larger ones take more,
# because they leave the cache between two calls.

Group = dict[str, object]

_SAME_BITS = (SGD, Adam, AdamW)
_SETTINGS = {bool, int, float, list, tuple, type(None)}  # their types in a group
_DTYPES = (torch.float32, torch.float64)  # in narrower ones foreach rounds a number first
_FEWEST = 8  # parameters
_MOST_EACH = 1 << 14  # elements of a parameter, on average
_MOST = 1 << 20  # elements of a group, for which memory is taken
# Of groups, by their number: where the parameters are in memory, none of which overlap.
_APART: weakref.WeakKeyDictionary[Optimizer, dict[int, object]] = weakref.WeakKeyDictionary()


def _in_few_calls(optimizer: Optimizer) -> Sequence[Group]:
    """Return the groups of an optimizer to update with one call for all of their parameters."""
    if type(optimizer) not in _SAME_BITS:
        return ()
    apart = _APART.setdefault(optimizer, {})
    groups = enumerate(optimizer.param_groups)
    return [g for i, g in groups if _has_same_bits(g, optimizer.state, apart, i)]


def _has_same_bits(
    group: Group,
    state: Mapping[Tensor, Mapping[str, object]],
    apart: dict[int, object],
    number: int,
) -> bool:
    """Return whether ``foreach`` is open, is faster, and has the bits of a plain step.

    It is asked before each update, because anything may have changed since the last one. So it is
    one function, of loops without calls.
    """
    params = cast(list[Tensor], group["params"])
    if len(params) < _FEWEST or group.get("foreach", 0) is not None:
        return False
    if group.get("fused") is not None or group.get("capturable") or group.get("differentiable"):
        return False
    if group.get("nesterov"):  # then foreach changes the gradients
        return False
    betas = cast(tuple[object, ...], group.get("betas", ()))
    if not _SETTINGS.issuperset(map(type, (*group.values(), *betas))):  # such as a tensor
        return False
    for p in params:
        if type(p) is not nn.Parameter or p.dtype not in _DTYPES or not p.is_cpu:
            return False
        for own in (p.grad, *state.get(p, {}).values()):
            if not isinstance(own, Tensor) or own.dtype is p.dtype:
                continue
            if own.ndim or own.dtype not in _DTYPES:  # it is not the number of its updates
                return False
    places = tuple(map(Tensor.data_ptr, params)), tuple(map(Tensor.numel, params))
    if apart.get(number) != places:
        if sum(places[1]) > min(_MOST_EACH * len(params), _MOST) or _overlap(params):
            return False
        apart[number] = places
    return True


def _overlap(params: Sequence[Tensor]) -> bool:
    """Return whether some memory belongs to two parameters. It would be updated twice."""
    places = sorted((p.data_ptr(), p.numel() * p.element_size()) for p in params)
    return any(start + size > after for (start, size), (after, _) in itertools.pairwise(places))
