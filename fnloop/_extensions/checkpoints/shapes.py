"""Parameters and buffers take other shapes in place: those of a checkpoint, or of a copy.

A tensor stays the object that it is, so the groups of the optimizers still hold it. Its memory is
new, with values that are to be loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import is_sharded
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.torch_compat import drop_accumulator, forget_sizes
from fnloop.extend import checks, optimizers, torch_compat

Shapes = Mapping[str, torch.Size]

# What modules of torch note of their shapes, by the dimensions of a tensor.
_SIZES = {
    nn.Linear: {"weight": ("out_features", "in_features")},
    nn.Embedding: {"weight": ("num_embeddings", "embedding_dim")},
    nn.EmbeddingBag: {"weight": ("num_embeddings", "embedding_dim")},
}


@contextlib.contextmanager
def take_shapes(module: nn.Module, shapes: Shapes) -> Iterator[list[Tensor]]:
    """Give parameters and buffers of a module other shapes. Take them back after an exception.

    Args:
        module: the module.
        shapes: name to shape. Names that the module does not have are passed over.

    Yields:
        The tensors that have another shape now.

    Raises:
        ValueError: the module is sharded over processes, or two names that share memory would not.
    """
    if not (found := _chosen(module, shapes)):  # memory of sharded tensors cannot be compared
        yield []
        return
    texts = [f"{name}: {tuple(t.shape)} here, {tuple(shapes[name])} there" for name, t in found]
    if is_sharded(module):
        raise ValueError(
            "a model that is sharded over processes cannot take other shapes: "
            f"{checks.join_names(texts)}. Make it in these shapes before it is sharded"
        )
    _check_alone(module, dict(found), shapes)
    with contextlib.ExitStack() as undone:
        for name, tensor in found:
            undone.enter_context(resized(tensor, shapes[name]))
            undone.enter_context(_sizes_noted(module, name, tensor.shape))
        yield [tensor for _, tensor in found]


def _chosen(module: nn.Module, shapes: Shapes) -> list[tuple[str, Tensor]]:
    """Return the tensors that get another shape, each once with its first name."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in _named(module):
        if name in shapes and shapes[name] != tensor.shape:
            found.setdefault(id(tensor), (name, tensor))
    return [*found.values()]


def _named(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    every = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    for spelled, tensor in every:
        yield torch_compat.strip_compile_prefix(spelled), tensor


def _check_alone(module: nn.Module, chosen: Mapping[str, Tensor], shapes: Shapes) -> None:
    """Raise ValueError if one of the tensors shares memory with another tensor, or has two shapes.

    Two names of one tensor are one tensor.
    """
    ids = {id(tensor): name for name, tensor in chosen.items()}
    memory = {_place_of(tensor): name for name, tensor in chosen.items() if tensor.numel()}
    for name, tensor in _named(module):
        own = ids.get(id(tensor))
        other = memory.get(_place_of(tensor), own)
        torn = own is not None and shapes.get(name, shapes[own]) != shapes[own]
        if other != own or torn:
            first = own if torn else other
            raise ValueError(
                f"{first} and {name} share memory in this {type(module).__name__}, and would not "
                f"in another shape, such as {tuple(shapes[first or name])}. Make the model in the "
                "shapes that it is to have"
            )


def _place_of(tensor: Tensor) -> object:
    if tensor.layout is not torch.strided or nn.parameter.is_lazy(tensor):
        return None
    return tensor.untyped_storage().data_ptr()


@contextlib.contextmanager
def resized(tensor: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """Give a leaf memory of another shape. Take it back after an exception.

    Its dimensions keep their order in memory, such as that of channels_last.
    """
    before, grad = tensor.data, tensor.grad
    _put(tensor, _memory_like(before, shape))
    tensor.grad = None
    try:
        yield tensor
    except BaseException:
        _put(tensor, before)
        tensor.grad = grad
        raise


def _put(tensor: Tensor, data: Tensor) -> None:
    drop_accumulator(tensor)
    tensor.data = data


def _memory_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    order = [*range(len(shape))]
    if len(shape) == tensor.ndim:
        order.sort(key=lambda dim: -tensor.stride(dim))
    made = torch.empty(
        [shape[dim] for dim in order],
        dtype=tensor.dtype,
        device=tensor.device,
    )
    return made.permute([order.index(dim) for dim in range(len(shape))])


@contextlib.contextmanager
def _sizes_noted(module: nn.Module, name: str, shape: torch.Size) -> Iterator[None]:
    """Write the sizes of a tensor where its module keeps them."""
    prefix, _, own = name.rpartition(".")
    owners = {
        torch_compat.strip_compile_prefix(each): owner for each, owner in module.named_modules()
    }
    owner = owners[prefix]
    kinds = [names for kind, names in _SIZES.items() if isinstance(owner, kind)]
    names = kinds[0].get(own, ()) if kinds else ()
    before = checks.fields_of(owner, names)
    for key, size in zip(names, shape, strict=False):
        setattr(owner, key, size)
    try:
        yield
    except BaseException:
        for key, size in before.items():
            setattr(owner, key, size)
        raise


def forget_states(state: TrainState, changed: Sequence[Tensor]) -> list[str]:
    """Drop what optimizers keep of tensors that have another shape now.

    Returns:
        The classes of the optimizers that kept something.
    """
    ids, found = {id(tensor) for tensor in changed}, []
    for optimizer in optimizers(state).values():
        every = [p for group in optimizer.param_groups for p in group["params"]]
        if ids.isdisjoint(map(id, every)):
            continue
        held = every if forget_sizes(optimizer) else changed  # LBFGS has one state for all
        kept = [optimizer.state.pop(p, None) for p in held]
        found += [type(optimizer).__name__] if any(kept) else []
    return found
