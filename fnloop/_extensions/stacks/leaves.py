"""The parameters of models of one architecture, stacked in memory.

Each model keeps parameters and buffers of its own, which are views of stacked tensors. So whatever
looks at them, such as a checkpoint or a hook, sees as many models. A step calls the loss function
once for all of them, by ``torch.func.vmap`` over the stacked tensors, and backward leaves one
stacked gradient for each parameter.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import vmap

from fnloop._extensions.stacks.torch_compat import is_batched, parameters_of
from fnloop.extend import Batch, checks, containers, torch_compat

Value = Batch  # a nested value with tensors in it, of any kind
INSTEAD = "Otherwise train these states one by one"


class Models(Protocol):
    """What is asked of the module of a stack here."""

    names: tuple[str, ...]

    @property
    def models(self) -> list[nn.Module]:
        """The models, in their order."""
        ...


# --------------------------------------------------------------------------------------------------
# The stacked tensors of a stack: its leaves.


class Slot(NamedTuple):
    """A place of the first model where the part of a leaf belongs in a call.

    Args:
        table: the parameters or the buffers of one of its modules.
        key: the name there.
        leaf: the number of the leaf.
    """

    table: dict[str, Tensor | None]
    key: str
    leaf: int


class Leaves:
    """The stacked parameters and buffers of a stack, of shape (models, ...).

    Args:
        stack: the stack.

    Attributes:
        params: the stacked parameters; they get the gradients.
        owners: for each of them, that parameter of every model.
        places: the numbers of the parameters by the identity of the first model's.
        buffers: the stacked buffers.
    """

    def __init__(self, stack: Models) -> None:
        self.stack = stack
        self.params: list[Tensor] = []
        self.owners: list[list[nn.Parameter]] = []
        self.buffers: list[Tensor] = []
        self.slots: list[Slot] = []
        # Of each buffer, and of each model: where it is. A buffer that is shared is in two places.
        self._held: list[list[list[tuple[dict[str, Tensor | None], str]]]] = []
        self.places: dict[int, int] = {}
        self._addresses: list[int] = []
        self.look_up()

    def look_up(self) -> None:
        """Look up which parameters and buffers the models have, and stack them.

        Raises:
            ValueError: the models have parameters or buffers of other names or shapes by now.
        """
        models = self.stack.models
        check_architectures(dict(zip(self.stack.names, models, strict=True)))
        self.owners = [[*each] for each in zip(*(m.parameters() for m in models), strict=True)]
        tables = [_tables(model, torch_compat.buffers_of) for model in models]
        shared: dict[int, list[int]] = {}
        for n, (table, key) in enumerate(tables[0]):
            shared.setdefault(id(table[key]), []).append(n)
        self._held = [[[own[n] for n in same] for own in tables] for same in shared.values()]
        self.places = {id(owners[0]): i for i, owners in enumerate(self.owners)}
        firsts = _tables(models[0], parameters_of)
        self.slots = [Slot(table, key, self.places[id(table[key])]) for table, key in firsts]
        for leaf, (first, *_) in enumerate(self._held, len(self.owners)):
            self.slots += [Slot(table, key, leaf) for table, key in first]
        if len(self.params) != len(self.owners):
            self.params[:] = [torch.empty(0) for _ in self.owners]  # others hold this list
        self.buffers = [torch.empty(0) for _ in self._held]
        self._stack()

    @torch.no_grad()
    def _stack(self) -> None:
        """Copy the values of the models into stacked tensors, of which theirs become views."""
        for i, owners in enumerate(self.owners):
            stacked = torch.stack([p.detach() for p in owners])
            leaf = self.params[i]
            if (leaf.shape, leaf.dtype, leaf.device) == (*_kind(stacked),):
                leaf.copy_(stacked)
            else:  # a new tensor, which the step looks up again
                self.params[i] = leaf = stacked
            leaf.requires_grad_(owners[0].requires_grad)
            for p, part in zip(owners, leaf.detach().unbind(), strict=True):
                p.data = part
        for i, held in enumerate(self._held):
            firsts = [table[key] for (table, key), *_ in held]
            self.buffers[i] = torch.stack(firsts)  # type: ignore[arg-type]
            for same, part in zip(held, self.buffers[i].unbind(), strict=True):
                for table, key in same:
                    table[key] = part
        self._addresses = self._where()

    def _where(self) -> list[int]:
        places = [p.data_ptr() for owners in self.owners for p in owners]
        places += [p.requires_grad for owners in self.owners for p in owners]
        for held in self._held:
            for table, key in itertools.chain.from_iterable(held):
                tensor = table.get(key)
                places.append(0 if tensor is None else tensor.data_ptr())
        return places

    def refresh(self) -> None:
        """Stack again what is not a view of the stacked tensors any more, or was frozen since."""
        if self._where() != self._addresses:
            self.look_up()

    def part(self, model: int) -> list[nn.Parameter]:
        """Return the parameters of one model, in the order of the leaves."""
        return [owners[model] for owners in self.owners]


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _tables(
    model: nn.Module, table_of: Callable[[nn.Module], dict[str, Tensor | None]]
) -> list[tuple[dict[str, Tensor | None], str]]:
    """Return where a model holds its parameters or its buffers, in the order of its modules."""
    found = [(table_of(module), module) for module in model.modules()]
    return [(table, key) for table, _ in found for key, held in table.items() if held is not None]


_leaves: WeakKeyDictionary[Models, Leaves] = WeakKeyDictionary()


def leaves_of(stack: Models, again: bool = False) -> Leaves:
    """Return the stacked tensors of a stack, made at the first call.

    Args:
        stack: the stack.
        again: whether to look up again which parameters there are.
    """
    if (found := _leaves.get(stack)) is None:
        found = _leaves[stack] = Leaves(stack)
    elif again:
        found.look_up()
    else:
        found.refresh()
    return found


# --------------------------------------------------------------------------------------------------
# A function of one model, called once for all.


def call_models(stack: Models, name: str, fn: Callable[[nn.Module], Value]) -> Value:
    """Call a function of a model for all models of a stack at once.

    Args:
        stack: the stack.
        name: the name of the function, for messages.
        fn: ``model -> result``; tensors in the result may depend on the model.

    Returns:
        The result. Each tensor in it has a first dimension for the models; but what is in
        :class:`Shared` is as it was returned.

    Raises:
        NotImplementedError: what it does depends on the values of a tensor, or torch cannot do it
            for several models at once.
    """
    __tracebackhide__ = True
    leaves = leaves_of(stack)
    first, slots = stack.models[0], leaves.slots
    before = [table[key] for table, key, _ in slots]
    count = len(leaves.params)

    def one(parts: Sequence[Tensor]) -> tuple[Value, list[Tensor]]:
        __tracebackhide__ = True
        try:
            for table, key, leaf in slots:
                table[key] = parts[leaf]
            result = fn(first)
            # A module may put another tensor in the place of a buffer.
            now: dict[int, Tensor | None] = {}
            for table, key, leaf in slots:
                if leaf >= count and now.setdefault(leaf, table[key]) is not table[key]:
                    raise NotImplementedError(
                        f"{name} cannot be called for a stack of models: it puts another tensor in "
                        f"the place of the buffer {key!r}, which two modules share, in one of them "
                        f"only. Change it in place, {key}.copy_(...). {INSTEAD}"
                    )
        finally:
            for (table, key, _), held in zip(slots, before, strict=True):
                table[key] = held
        return result, [_as_tensor(now[count + i]) for i in range(len(leaves.buffers))]

    given = [*leaves.params, *leaves.buffers]
    result, buffers = _vmapped(one, given, name, given[count:])
    with torch.no_grad():
        for stacked, new in zip(leaves.buffers, buffers, strict=True):
            if new is not None:
                stacked.copy_(new)
    return result


def call_each(fn: Callable[[Value], Value], given: Value, name: str) -> Value:
    """Call a function of one model's results for all models at once.

    Args:
        fn: a function of such a value as is given, but of one model.
        given: the value: each tensor in it has a first dimension for the models.
        name: the name of the function, for messages.
    """
    __tracebackhide__ = True
    tensors: list[Tensor] = []
    containers.map_leaves(
        given, lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None
    )

    def one(parts: Sequence[Tensor]) -> tuple[Value, list[Tensor]]:
        __tracebackhide__ = True
        left = iter(parts)
        take = lambda leaf: next(left) if isinstance(leaf, Tensor) else leaf
        return fn(containers.map_leaves(given, take)), []

    return _vmapped(one, tensors, name, ())[0]


class Shared:
    """A tensor that all models have in common, in the result of a function of one model.

    Args:
        value: the tensor.
    """

    __slots__ = ("value",)

    def __init__(self, value: object) -> None:
        self.value = value

    @property
    def differs(self) -> bool:
        """Whether it depends on the model; only within the call."""
        return is_batched(self.value)


_PLACE = object()  # of a tensor in a nested value


def _vmapped(
    fn: Callable[[Sequence[Tensor]], tuple[Value, list[Tensor]]],
    given: Sequence[Tensor],
    name: str,
    same: Sequence[Tensor],
) -> tuple[Value, list[Tensor | None]]:
    """Return what a function returns for all models, and the further tensors that are new.

    Args:
        fn: ``parts -> (result, further tensors)``.
        given: the tensors to take parts of.
        name: the name of what is called.
        same: what the further tensors are where nothing else was put in their place.
    """
    __tracebackhide__ = True
    shape: list[Value] = []  # of the result, and which of the further tensors are new
    offset = len(given) - len(same)

    def one(*parts: Tensor) -> tuple[Tensor, ...]:
        __tracebackhide__ = True
        result, further = fn(parts)
        outs: list[Tensor] = []

        def put(leaf: object) -> object:
            if not isinstance(leaf, Tensor):
                return leaf
            outs.append(leaf)
            return _PLACE

        shape.append(containers.map_leaves(result, put))
        kept = [new is parts[offset + i] for i, new in enumerate(further)]
        shape.append(kept)
        outs += [new for new, is_kept in zip(further, kept, strict=True) if not is_kept]
        return tuple(outs) or (parts[0],)

    try:
        found = iter(vmap(one, randomness="different")(*given))
    except (RuntimeError, ValueError) as error:
        if (why := _refused(str(error))) is None:
            raise
        raise NotImplementedError(
            f"{name} cannot be called for a stack of models: {why}"
        ) from error
    result, kept = shape
    filled = containers.map_leaves(result, lambda leaf: next(found) if leaf is _PLACE else leaf)
    return filled, [None if is_kept else next(found) for is_kept in kept]


def _refused(message: str) -> str | None:
    """Return why torch cannot call a function for several models at once, by its message."""
    if "data-dependent" in message or ".item()" in message or "nonzero" in message:
        return (
            "what it does depends on the values of a tensor (.item(), float(), if tensor:), and "
            f"these differ between models. Compute with tensors: torch.where(...). {INSTEAD}"
        )
    if "vmap" in message or "functorch" in message or "atching rule" in message:
        return f"torch.func.vmap says: {message.splitlines()[0]} {INSTEAD}"
    return None


def _as_tensor(value: Tensor | None) -> Tensor:
    assert value is not None, "a buffer was removed in forward"
    return value


# --------------------------------------------------------------------------------------------------
# Whether models have one architecture.


def check_architectures(models: Mapping[str, nn.Module]) -> None:
    """Raise ValueError unless models differ in nothing but the values of parameters and buffers.

    The message names the first difference.
    """
    (first_name, first), *others = models.items()
    for name, model in others:
        if how := _how_they_differ(first, model, f"{first_name!r} and {name!r}"):
            raise ValueError(f"stack expects models of one architecture, but {how}. {INSTEAD}")


def _how_they_differ(first: nn.Module, model: nn.Module, both: str) -> str | None:
    """Return the first difference between two models, whose names are ``both``; None if none."""
    known, found = (dict(one.named_modules(remove_duplicate=False)) for one in (first, model))
    if [*known] != [*found]:
        path = next((p for p in (*known, *found) if p not in known or p not in found), "")
        return f"of {both} only one has the module {path!r}"
    for path, module in known.items():
        if (what := _difference(module, found[path])) is not None:
            of = f"the module {path!r} ({type(module).__name__})" if path else "the models"
            return f"{of} of {both} differ in {what}"
    if _ties(first) != _ties(model):
        return f"{both} share parameters between their modules in different ways"
    return None


def _ties(model: nn.Module) -> list[int]:
    """Return, for each place of a parameter or a buffer, the first place that has the same one."""
    named = [*model.named_parameters(remove_duplicate=False)]
    named += [*model.named_buffers(remove_duplicate=False)]  # type: ignore[arg-type]
    firsts: dict[int, int] = {}
    return [firsts.setdefault(id(tensor), i) for i, (_, tensor) in enumerate(named)]


def _difference(a: nn.Module, b: nn.Module) -> str | None:
    """Return in what two modules differ, without those in them; None: in nothing."""
    if type(a) is not type(b):
        return f"their classes, {type(a).__name__} and {type(b).__name__}"
    for tables in (parameters_of, torch_compat.buffers_of):
        mine, its = tables(a), tables(b)
        for key in {**mine, **its}:
            one, other = _facts(mine.get(key)), _facts(its.get(key))
            if one != other:
                return f"{key}: {one} and {other}"
    mine, its = vars(a), vars(b)
    for key in {**mine, **its}:
        if key.startswith("_") or key == "training":
            continue
        if key not in mine or key not in its or not _same(mine[key], its[key], set()):
            return f"{key}: {checks.describe(mine.get(key))} and {checks.describe(its.get(key))}"
    return None


def _facts(tensor: Tensor | None) -> str:
    if tensor is None:
        return "none"
    kind = str(tensor.dtype).removeprefix("torch.")
    frozen = "" if tensor.requires_grad or not isinstance(tensor, nn.Parameter) else ", frozen"
    return f"{tuple(tensor.shape)} {kind} on {tensor.device}{frozen}"


_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def _same(a: Value, b: Value, seen: set[int]) -> bool:
    """Return whether two attributes of modules are the same setting."""
    if a is b or id(a) in seen:
        return True
    if type(a) is not type(b):
        return False
    seen = seen | {id(a)}
    if isinstance(a, _PLAIN):
        return bool(a == b)
    if isinstance(a, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and bool(torch.equal(a, b))
    if isinstance(a, nn.Module):
        return True  # it is compared for itself
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return [*a] == [*b] and all(_same(a[key], b[key], seen) for key in a)
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__
    if isinstance(a, BuiltinFunctionType | type):
        return False
    return _same(containers.vars_of(a), containers.vars_of(b), seen)
