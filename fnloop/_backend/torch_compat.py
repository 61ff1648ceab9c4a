"""Every private or undocumented name of torch that fnloop uses."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.utils.data import DataLoader

from fnloop._display.checks import has_methods
from fnloop._display.screen import log

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# CI runs them on torch 2.11.0, 2.13.0 and 2.15.0. Each has a guard. Where a name is missing there
# is a fallback, or an error that says what to do where continuing would be unsafe. `import fnloop`
# depends on none of them.

CHECKED = "2.11 to 2.15"
Item = TypeVar("Item")
COMPILED = "_orig_mod"  # the attribute of torch.compile's wrapper that is the module


def _missing(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"torch {torch.__version__} has no {name}, which fnloop needs {why}. Install torch "
        f"{CHECKED}, or a newer fnloop"
    )


def _required(owner: object, name: str, known_as: str, why: str) -> Any:
    """Return what is needed of torch under a name. Raise RuntimeError if there is no such name."""
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _missing(known_as, why) from None


def _found(owner: object, name: str, fallback: Item) -> Item:
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


_wrapper = _find_wrapper()
_optim = sys.modules[Optimizer.__module__]
_switch = _found(_optim, "_use_grad_for_differentiable", lambda _: None)(lambda: None)
_grad_switch: object = getattr(_switch, "__code__", object())
_pre_hooks = _found(_optim, "_global_optimizer_pre_hooks", True)
_post_hooks = _found(_optim, "_global_optimizer_post_hooks", True)
_profiler_enabled = _found(torch.autograd, "_profiler_enabled", lambda: True)


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
        or getattr(step, "__code__", None) is not _wrapper
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


def bare_step(optimizer: Optimizer) -> Callable[[Optimizer], object]:
    """Return the code of an optimizer's step, for torch.compile, which stops at torch's wrappers.

    It is a copy, as torch limits how often it compiles the same code. It is to be called without
    gradients. Fallback: with the wrappers.

    Raises:
        RuntimeError: hooks are called around it.
    """
    # A scheduler of torch patches it, to note that there was a step.
    noted = getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", False)
    if _calls_hooks(optimizer) if noted else has_step_hooks(optimizer):
        raise RuntimeError("hooks are called around the optimizer's step")
    step = cast(types.FunctionType, type(optimizer).step)
    for code in (_wrapper, _grad_switch):
        if step.__code__ is code:
            step = vars(step)["__wrapped__"]
    copied = types.FunctionType(
        step.__code__.replace(),
        step.__globals__,
        step.__name__,
        step.__defaults__,
        step.__closure__,
    )
    copied.__kwdefaults__ = step.__kwdefaults__
    return copied


def is_hook_table(name: str) -> bool:
    """Return whether an attribute of an optimizer holds hooks."""
    return name.startswith("_optimizer_") and name.endswith("_hooks")


def has_state_dict_hooks(optimizer: Optimizer) -> bool:
    """Return whether hooks change what an optimizer saves or loads."""
    for name, held in vars(optimizer).items():
        if "state_dict" in name and held and is_hook_table(name):
            return True
    return False


def local_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer in a ZeroRedundancyOptimizer, of this process's parameters.

    It keeps the state. Of any other optimizer, it is the optimizer itself. Fallback: the same.
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if type(optimizer) is not getattr(module, "ZeroRedundancyOptimizer", None):
        return optimizer
    inner = getattr(optimizer, "optim", None)
    return inner if isinstance(inner, Optimizer) else optimizer


def silence_capturable_warning(optimizer: Optimizer) -> None:
    """Let a capturable optimizer run eagerly without a warning. Fallback: torch warns once."""
    vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True


def forget_sizes(optimizer: Optimizer) -> bool:
    """Make LBFGS count its parameters again. Return whether it is one, with one state for all."""
    if not isinstance(optimizer, LBFGS):
        return False
    if "_numel_cache" in vars(optimizer):
        optimizer._numel_cache = None
    return True


# --- CUDA

clear_cublas_workspaces: Callable[[], object] = _found(  # Fallback: see CudaRecorder
    torch._C, "_cuda_clearCublasWorkspaces", lambda: None
)


# --- tensors


def _foreach(name: str) -> Callable[..., object]:
    """Return an operation on a list of tensors. Fallback: one tensor after the other."""

    def one_by_one(tensors: Sequence[Tensor], other: object, **options: object) -> None:
        others = other if isinstance(other, list) else [other] * len(tensors)
        for tensor, value in zip(tensors, others, strict=True):
            operator.methodcaller(name, value, **options)(tensor)

    return _found(torch, f"_foreach_{name}", one_by_one)


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
foreach_norm: Callable[..., Sequence[Tensor]] = _found(
    torch,
    "_foreach_norm",
    lambda tensors, norm_type=2.0: [torch.linalg.vector_norm(t, norm_type) for t in tensors],
)
unscale_: Callable[[Sequence[Tensor], Tensor, Tensor], object] = _found(  # as GradScaler does
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
foreach_lerp_ = _found(torch, "_foreach_lerp_", _lerp_one_by_one)


def sparse_values(grad: Tensor) -> Tensor:
    """Return the values of a sparse gradient, in its memory. Fallback: it must be coalesced."""
    return grad._values() if hasattr(grad, "_values") else grad.values()


def cpu_capabilities() -> Mapping[str, object]:
    """Return the instruction sets of this CPU, by name. Fallback: none is known."""
    return _found(torch.cpu, "get_capabilities", dict)()


def _loads_as_usual(module: object) -> bool:
    own, usual = (getattr(c, "_load_from_state_dict", None) for c in (type(module), nn.Module))
    return own is usual


def loads_by_itself(module: nn.Module) -> bool:
    """Return whether a class loads its tensors in a way of its own, and no hook takes part.

    A hook may change other modules than the one that is loaded. Fallback: no.
    """
    hooks = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    hooked = any(getattr(m, name, True) for m in module.modules() for name in hooks)
    return not hooked and not _loads_as_usual(module)


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state_dict is that of what ``get_extra_state`` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def loads_other_names(module: nn.Module, name: str) -> bool:
    """Return whether a tensor may be saved under another name, or loaded in another way.

    So it may where a module that it is in loads in a way of its own, or where a hook takes part.
    Fallback: yes.
    """
    inside = module
    for part in (None, *name.split(".")[:-1]):
        inside = inside if part is None else getattr(inside, part, None)
        if not _loads_as_usual(inside) or getattr(inside, "_load_state_dict_pre_hooks", True):
            return True
    return False


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


def leaf_of(node: object) -> Tensor | None:
    """Return the leaf that an autograd node accumulates into. Fallback: DDP searches for leaves."""
    return getattr(node, "variable", None)


def seeder_of(index: int) -> Callable[[int], object]:
    """Return what seeds the generator of a CUDA device. Fallback: it seeds those of all devices."""
    generators = getattr(torch.cuda, "default_generators", None)
    return generators[index].manual_seed if generators else torch.cuda.manual_seed_all


def drop_accumulator(leaf: Tensor) -> None:
    """Make the node that adds up the gradients of a leaf again, before the leaf gets another shape.

    A graph or DDP may hold the node. It would sum new gradients to the old shape, without an error.
    """
    other = torch.float32 if leaf.dtype == torch.float64 else torch.float64
    leaf.data = torch.empty(0, dtype=other, device=leaf.device)  # torch makes it for a new dtype


# --- operators


class _NoDispatchMode:
    """Stands for torch's class: it can be derived from, and raises when it is entered."""

    def __enter__(self) -> None:
        raise _missing("TorchDispatchMode", "to watch which operators run")

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


def _tags_of(func: object) -> Sequence[object]:
    return getattr(func, "tags", ())


def is_of_profiler(func: object) -> bool:
    """Return whether an operator marks something for a profiler."""
    return getattr(func, "namespace", None) == "profiler"


def returns_values(func: object) -> bool:
    """Return whether an operator returns what it reads of a tensor. Fallback: see its name."""
    return torch.Tag.data_dependent_output in _tags_of(func) or reads_to_host(func)


def shapes_by_values(func: object, args: Sequence[object]) -> bool:
    """Return whether the shape of what an operator returns depends on values. Fallback: no."""
    if torch.Tag.dynamic_output_shape not in _tags_of(func):
        return False
    masks = torch.bool, torch.uint8
    return str(func) != "aten.index.Tensor" or any(
        isinstance(t, Tensor) and t.dtype in masks for t in cast(Sequence[object], args[1])
    )


def draws(func: object) -> bool:
    """Return whether an operator draws random numbers. Fallback: no."""
    return torch.Tag.nondeterministic_seeded in _tags_of(func)


def is_foreach_norm(func: object) -> bool:
    """Return whether an operator takes the norms of several tensors."""
    return str(func) == "aten._foreach_norm.Scalar"


def begins_constant(func: object) -> bool:
    """Return whether an operator makes a tensor of Python's numbers a part of a computation."""
    return str(func) == "aten.lift_fresh.default"


def writes(func: object) -> bool:
    """Return whether an operator may write to its arguments. Fallback: it may.

    Those of batch norm write to the running statistics, of which their schemas say nothing.
    """
    mutable = getattr(getattr(func, "_schema", None), "is_mutable", True)
    return mutable or "batch_norm" in str(func)


def reads_to_host(func: object) -> bool:
    """Return whether an operator reads a tensor to the host."""
    return str(func) == "aten._local_scalar_dense.default"


# --- modules


def compiler_is_loaded() -> bool:
    """Return whether torch.compile may have compiled something in this process."""
    return "torch._dynamo" in sys.modules


def draws_by_inductor() -> bool:
    """Return whether compiled code draws other random numbers than eager code. Fallback: it does.

    That is what Inductor does unless ``fallback_random`` is set.
    """
    config = sys.modules.get("torch._inductor.config")
    return config is not None and not getattr(config, "fallback_random", False)


def compile_operators(
    module: torch.fx.GraphModule,
    inputs: list[Tensor],
    backend: object = "inductor",
    mode: str | None = None,
    options: Mapping[str, object] | None = None,
) -> Callable[..., Sequence[Tensor]]:
    """Compile a graph of operators for these inputs, which are the arguments of every call.

    Inductor draws the random numbers of eager code, unless the options say otherwise. Fallback:
    torch.compile, which looks at each argument before each call.
    """
    if callable(backend):
        return cast(Callable[..., Sequence[Tensor]], backend(module, inputs))
    exact = {"fallback_random": True, "size_asserts": False, **(options or {})}
    with contextlib.suppress(ImportError, AttributeError):
        if backend != "inductor":
            from torch._dynamo.backends.registry import lookup_backend

            return lookup_backend(str(backend))(module, inputs)  # type: ignore[return-value]
        import torch._inductor as inductor

        of_mode = inductor.list_mode_options(mode) if mode else {}
        settings = {**of_mode, **exact}
        return inductor.compile(module, inputs, options=settings)  # type: ignore[return-value]
    wanted = None if mode or backend != "inductor" else exact
    return torch.compile(module, backend=backend, dynamic=False, mode=mode, options=wanted)  # type: ignore[arg-type]


def uncompiled(model: nn.Module) -> nn.Module | None:
    """Return the module in torch.compile's wrapper, or None. Fallback: it stays wrapped."""
    inner = getattr(model, COMPILED, None)
    return inner if isinstance(inner, nn.Module) else None


_batch_norm: type[nn.BatchNorm1d] = _found(  # fallback: the class for vectors
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


def parameters_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of parameters, to put other tensors there for a call.

    Raises:
        RuntimeError: torch has no such table.
    """
    own = vars(module).get("_parameters")
    if own is None:
        raise _missing("Module._parameters", "to train a stack of models")
    return own


def has_forward_hooks(module: nn.Module) -> bool:
    """Return whether hooks are called around a module's forward or backward. Fallback: none."""
    return any(
        held
        for name, held in vars(module).items()
        if name.startswith(("_forward_", "_backward_")) and name.endswith("hooks")
    )


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether something else is called around an optimizer's step, or in its place."""
    return bool(
        "step" in vars(optimizer)  # patched, as torch's schedulers do
        or _calls_hooks(optimizer)
    )


def _calls_hooks(optimizer: Optimizer) -> object:
    return (
        getattr(optimizer, "_optimizer_step_pre_hooks", True)
        or getattr(optimizer, "_optimizer_step_post_hooks", True)
        or _pre_hooks
        or _post_hooks
    )


def is_batched(value: object) -> bool:
    """Return whether a tensor stands for one of each model, within ``vmap``. Fallback: it does."""
    asked = getattr(getattr(torch._C, "_functorch", None), "is_batchedtensor", None)
    return isinstance(value, Tensor) and (asked is None or bool(asked(value)))


# --- data loaders


def set_worker_dataset(info: object, dataset: object) -> None:
    """Replace the data set in ``get_worker_info()``. Fallback: a warning."""
    try:
        object.__setattr__(info, "dataset", dataset)
    except (AttributeError, TypeError):
        log.warning("get_worker_info().dataset is a wrapper in torch %s", torch.__version__)


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
        _required(loader, "_iterator", "DataLoader._iterator", why)
    loader._iterator = None


# --- several processes

_c10d = getattr(dist, "distributed_c10d", None)


def process_groups() -> list[Any]:
    """Return all process groups. Fallback: the default one."""
    world = getattr(_c10d, "_world", None)
    return [dist.group.WORLD] if world is None else [*world.pg_map]


def default_store() -> dist.Store:
    """Return the store in which the processes of the default group have met."""
    name = "_get_default_store"
    return _required(_c10d, name, name, "when there are several processes")()


@contextlib.contextmanager
def meeting_in(store: object) -> Iterator[None]:
    """Make new groups meet in this store instead of the default one."""
    why = "when there are several processes"
    world, group = _required(_c10d, "_world", "distributed_c10d._world", why), dist.group.WORLD
    backend, usual = world.pg_map[group]
    world.pg_map[group] = backend, store
    try:
        yield
    finally:
        world.pg_map[group] = backend, usual


def collectives_begun(group: object) -> int | None:
    """Return how many collectives of a group this process has begun, or None."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    try:
        return None if count is None else count()
    except RuntimeError:  # a backend that does not count
        return None


def broadcast_coalesced(group: dist.ProcessGroup | None, tensors: list[Tensor]) -> None:
    """Broadcast tensors of the main process in place. Fallback: one tensor after the other."""
    at_once = getattr(dist, "_broadcast_coalesced", None)
    if at_once is not None:
        at_once(group, tensors, 250 << 20, 0)  # as torch's DDP does
        return
    for t in tensors:
        dense = t.contiguous()
        dist.broadcast(dense, 0, group=group)
        t.copy_(dense)


def ignored_by_ddp(module: nn.Module) -> list[str]:
    """Return the parameters and buffers that DDP is told to ignore. Fallback: none."""
    return sorted(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def settings_of_ddp(ddp: DistributedDataParallel) -> dict[str, object]:
    """Return the settings of a DDP by the names of its arguments. Fallback: defaults."""
    held = vars(ddp)
    given: dict[str, object] = {name: held[name] for name in _DDP_SETTINGS if name in held}
    given["delay_all_reduce_named_params"] = held.get("_delay_all_reduce_params")
    given["bucket_cap_mb_list"] = held.get("bucket_bytes_cap_list")
    if not held.get("bucket_bytes_cap_default", True):
        given["bucket_cap_mb"] = held["bucket_bytes_cap"] / 2**20
    return given


_DDP_SETTINGS = (  # attributes that have the names of arguments
    *("broadcast_buffers", "forward_sync_buffers", "find_unused_parameters", "static_graph"),
    *("gradient_as_bucket_view", "batched_grad_copy", "skip_all_reduce_unused_params"),
    *("mixed_precision", "process_group"),
)


def hooks_of_ddp(ddp: DistributedDataParallel) -> list[tuple[Callable[..., object], object]]:
    """Return the communication hooks of a DDP, each with its state.

    Raises:
        RuntimeError: torch does not tell.
        NotImplementedError: a hook is one of torch's own in C++, which has no object.
    """
    known_as = "DistributedDataParallel._comm_hooks"
    hooks = _required(ddp, "_comm_hooks", known_as, "to keep your communication hook")
    tell = _found(ddp, "_get_ddp_logging_data", dict)
    if not hooks and (builtin := tell().get("comm_hook")):
        raise NotImplementedError(
            f"this model is in DistributedDataParallel with the hook {builtin}, which cannot be "
            "taken over. Register a function: model.register_comm_hook(None, "
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook)"
        )
    return [*hooks]


def reduce_in_backward(ddp: DistributedDataParallel, loss: Tensor) -> Tensor:
    """Return a loss whose backward averages gradients over processes, in buckets that stay as made.

    Fallback: DDP's own forward. It sorts the buckets again after the first update, so that a
    resumed run on three processes or more may differ from an uninterrupted one in the last bits.
    """
    prepare = getattr(getattr(ddp, "reducer", None), "prepare_for_forward", None)
    finish = getattr(ddp, "_post_forward", None)
    if finish is None or prepare is None:
        return cast(Tensor, DistributedDataParallel.forward(ddp, loss))
    prepare()
    return finish(loss)


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
