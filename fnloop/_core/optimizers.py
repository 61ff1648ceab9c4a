"""The optimizers of a state, one or several by name, and the numbers of their groups.

One optimizer has no name; here its name is "". So callers loop, and need not know how many there
are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple, NoReturn

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.metrics import Last
from fnloop._core.parts import State
from fnloop._core.types import Metric, View
from fnloop._display.checks import describe, has_methods, join_names

Group = dict[str, Any]  # a parameter group of an optimizer
Handle = Any  # what state.optimizer is: an Optimizer, or Optimizers
EXAMPLE = '{"matrices": muon, "rest": adamw}'


class Optimizers(Mapping[str, Optimizer]):
    """Several optimizers by name, in the order in which they update. It cannot be changed.

    Args:
        named: name to optimizer.

    Example:
        >>> import torch
        >>> weights = [torch.nn.Parameter(torch.ones(2, 2))]
        >>> Optimizers({"matrices": torch.optim.Muon(weights)})
        {'matrices': Muon}
    """

    __slots__ = ("_named",)

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        self._named = dict(named)

    def __getitem__(self, name: str) -> Optimizer:
        if name not in self._named:
            raise KeyError(f"there is no optimizer {name!r}; those are: {', '.join(self._named)}")
        return self._named[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __len__(self) -> int:
        return len(self._named)

    def __repr__(self) -> str:
        shown = (f"{name!r}: {type(one).__name__}" for name, one in self._named.items())
        return f"{{{', '.join(shown)}}}"

    def __getattr__(self, attribute: str) -> NoReturn:
        of_one = hasattr(Optimizer, attribute) or attribute in ("param_groups", "state", "defaults")
        if of_one:
            raise AttributeError(
                f"the state has several optimizers: write state.optimizer[name].{attribute}, with "
                f"one of the names {', '.join(self._named)}"
            )
        raise AttributeError(f"'Optimizers' object has no attribute {attribute!r}")


# --- what callers loop over


def optimizers_in(optimizer: Handle) -> Mapping[str, Optimizer]:
    """Return optimizers by name, from what ``state.optimizer`` is; one alone has the name ""."""
    # Not isinstance, which is slow for a class with an abstract base.
    return optimizer if type(optimizer) is Optimizers else {"": optimizer}


def groups_in(optimizer: Handle) -> Sequence[Group]:
    """Return the parameter groups of all optimizers, from what ``state.optimizer`` is."""
    if type(optimizer) is Optimizers:
        return [group for one in optimizer.values() for group in one.param_groups]
    return optimizer.param_groups


def in_form(given: object, optimizers: Collection[Optimizer]) -> Handle:
    """Return optimizers in the form of what was given: the only one, or several by name."""
    if isinstance(given, Mapping):
        return Optimizers(dict(zip(given, optimizers, strict=True)))
    (only,) = optimizers
    return only


def labelled_groups(named: Mapping[str, Optimizer]) -> dict[str, Group]:
    """Return parameter groups by what follows the name of a number of them in a report.

    It is ``group["name"]`` for one that has a name, and otherwise its place in the optimizer, which
    the first one does without.

    Raises:
        ValueError: two groups would have the same.

    Example:
        >>> import torch
        >>> sgd = torch.optim.SGD([{"params": torch.ones(1)}, {"params": torch.ones(1)}])
        >>> [*labelled_groups({"": sgd})], [*labelled_groups({"a": sgd})]
        (['', '/1'], ['/a', '/a/1'])
        >>> sgd.param_groups[0]["name"] = "head"
        >>> [*labelled_groups({"": sgd})]
        ['/head', '/1']
    """
    found: dict[str, Group] = {}
    for name, one in named.items():
        of_optimizer = f"/{name}" if name else ""
        for i, group in enumerate(one.param_groups):
            given = group.get("name")
            part = given if given and isinstance(given, str) else i
            label = f"{of_optimizer}/{part}" if part else of_optimizer
            if label in found:
                raise ValueError(
                    f"two parameter groups{f' of {name!r}' if name else ''} are called {part!r}, "
                    f"and their learning rates would both be train/lr{label} in records: give each "
                    'group["name"] once'
                )
            found[label] = group
    return found


@functools.cache
def wants_closure(optimizer: type) -> bool:
    """Return whether optimizers of a class evaluate the loss by themselves."""
    if issubclass(optimizer, Optimizers):
        return False
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# --- what schedules change

UNFROZEN = "unfrozen"  # group["unfrozen"]: True in the groups that unfreeze has made
SCHEDULED = "set_by_schedule_"  # group["set_by_schedule_lr"]: what a schedule set group["lr"] to
_CYCLED = ("lr", "momentum", "betas")  # what schedulers of torch change
BEFORE, SET = "_before_scheduler", "_set_by_scheduler"  # group["lr_before_scheduler"]


def was_scheduled(group: Group, key: str) -> bool:
    """Return whether a schedule, ours or torch's, has set a number of a group."""
    return SCHEDULED + key in group or key + SET in group


def set_by_torch(group: Group, key: str) -> bool:
    """Return whether a number of a group is as a scheduler of torch has left it."""
    value, last = number_in(group, key), group.get(key + SET)
    if last is None or isinstance(value, Tensor):
        return last is not None and last is value
    return bool(last == value)


def initial_value(group: Group, key: str) -> Any:
    """Return what a number of a group was before its first schedule, or was set to since."""
    value = number_in(group, key)
    as_set = {key + BEFORE: group.get(key + SET), f"initial_{key}": group.get(SCHEDULED + key)}
    for initial, last in as_set.items():
        # No tensor is read: one that is there is as its schedule has left it.
        if last is not None and (last is value or isinstance(value, Tensor) or last == value):
            return group[initial]
    return value


def keep_initial(group: Group, key: str) -> None:
    """Note what a number of a group was before an earlier schedule, for one that begins now."""
    if was_scheduled(group, key):
        group[f"initial_{key}"] = initial_value(group, key)
        group[SCHEDULED + key] = number_in(group, key)


def begin_again(groups: Iterable[Group]) -> None:
    """Set what schedulers of torch change to its initial values, before one is made."""
    for group in groups:
        for key in _CYCLED:
            if key not in group:
                continue
            group[key + BEFORE] = _set_initial(group, key)


def _set_initial(group: Group, key: str) -> object:
    """Set a setting to its initial value, and return that."""
    initial = initial_value(group, key)
    if isinstance(initial, Tensor):
        initial = initial.clone()
        number_in(group, key).copy_(initial)  # it may have a dimension, which fill_ refuses
    else:
        put_number(group, key, initial)
    if f"initial_{key}" in group:  # torch's schedulers take it for the rate to begin with
        group[f"initial_{key}"] = initial
    return initial


def forget_schedules(groups: Iterable[Group]) -> None:
    """Set what schedules have set to its initial values, as if there had been no schedule."""
    for group in groups:
        ours = {key.removeprefix(SCHEDULED) for key in group if key.startswith(SCHEDULED)}
        theirs = {key.removesuffix(SET) for key in group if key.endswith(SET)}
        for key in ours | theirs:
            # The first is a mark of its own, group["set_by_schedule_initial_lr"].
            if key.startswith("initial_") or number_in(group, key) is None:
                continue
            _set_initial(group, key)
            for mark in (SCHEDULED + key, f"{SCHEDULED}initial_{key}", key + BEFORE, key + SET):
                group.pop(mark, None)


def note_set(groups: Iterable[Group]) -> None:
    """Note what a scheduler of torch has set, so that a change by someone else is noticed."""
    for group in groups:
        for key in _CYCLED:
            if key in group:
                group[key + SET] = group[key]


def is_torch_optimizer(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, not of a class derived from it."""
    return getattr(torch.optim, type(optimizer).__name__, None) is type(optimizer)


# --- what may be given


def check_optimizers(given: object) -> None:
    """Raise unless this is an optimizer, or a mapping of several by name.

    Raises:
        TypeError: it is something else.
        ValueError: the mapping is empty, a name cannot be one, or two groups have one name.
    """
    if isinstance(given, Optimizer):
        labelled_groups({"": given})
        return
    if not isinstance(given, Mapping):
        raise TypeError(
            "TrainState.create expects an optimizer second, such as "
            "torch.optim.SGD(model.parameters(), lr=0.1), or a mapping of several by name, "
            f"{EXAMPLE}; got {describe(given)}"
        )
    if not given:
        raise ValueError(
            f"TrainState.create expects at least one optimizer, such as {EXAMPLE}; got an empty "
            "mapping"
        )
    for name, one in given.items():
        _check_name(name)
        if not isinstance(one, Optimizer):
            raise TypeError(
                f"TrainState.create expects optimizers in the mapping; got {describe(one)} under "
                f"{name!r}"
            )
    labelled_groups(given)


def _check_name(name: object) -> None:
    expected = f"TrainState.create expects names of optimizers, as in {EXAMPLE}"
    if not isinstance(name, str):
        raise TypeError(f"{expected}; got {describe(name)}")
    if not name.strip() or "/" in name:
        raise ValueError(
            f'{expected}, without "/", which separates the parts of a name such as '
            f"train/lr/rest; got {describe(name)}"
        )


def check_shares(model: nn.Module, named: Mapping[str, Optimizer]) -> None:
    """Raise ValueError if a parameter to be trained is in none of the optimizers.

    One may be in several, such as those of ``using``, unless an evaluation sees other weights by
    one of them.
    """
    for name, one in named.items():
        if not _has_modes(type(one)):
            continue
        for other, theirs in named.items():
            if other != name and (p := first_shared(model, {name: one, other: theirs})):
                raise ValueError(
                    f"the parameter {p.name} is in two optimizers, {p.one!r} and {p.other!r}, and "
                    f"an evaluation would see the weights of {type(one).__name__} ({name!r}) while "
                    f"{other!r} updates: leave it out of one"
                )
    if (message := explain_untrained(model, named.values())) is not None:
        raise ValueError(message)


class Shared(NamedTuple):
    """A parameter that two optimizers have.

    Args:
        name: its name.
        one: the name of the first optimizer.
        other: that of the second.
    """

    name: str
    one: str
    other: str


def first_shared(model: nn.Module, named: Mapping[str, Optimizer]) -> Shared | None:
    """Return the first parameter that two optimizers have; None if there is none."""
    names = {id(p): strip_compile_prefix(name) for name, p in model.named_parameters()}
    found: dict[int, str] = {}
    for owner, one in named.items():
        for i, group in enumerate(one.param_groups):
            for j, p in enumerate(group["params"]):
                if (other := found.setdefault(id(p), owner)) != owner:
                    name = names.get(id(p), f"param_groups[{i}]['params'][{j}] of {owner!r}")
                    return Shared(name, other, owner)
    return None


def check_used(model: nn.Module, optimizer: Handle, names: Sequence[str] | None) -> None:
    """Raise ValueError unless one update can be made with these optimizers together.

    Args:
        model: the model.
        optimizer: what ``state.optimizer`` is.
        names: those that ``using`` names; None: all.
    """
    named = optimizers_in(optimizer)
    if unknown := [name for name in names or () if not name or name not in named]:
        has = join_names([*named], 5)
        if "" in named:
            listed = ", ".join(f'"{name}": ...' for name in names or ())
            has = "one optimizer, without a name: leave using out, or give each a name, "
            has += f"TrainState.create(model, {{{listed}}})"
        raise ValueError(f"using names the optimizer {unknown[0]!r}, but this state has {has}")
    used = {name: one for name, one in named.items() if names is None or name in names}
    if len(used) < 2:
        return
    for name, one in used.items():
        if wants_closure(type(one)):
            raise ValueError(
                f"{type(one).__name__} ({name!r}) evaluates the loss by itself, so an update "
                f"cannot be made with another optimizer too, and this step updates with "
                f'{join_names([*used], 5)}: list using("{name}") in the pipeline of one step, and '
                "using(...) with the others in that of another"
            )
    if (shared := first_shared(model, used)) is not None:
        raise ValueError(
            f"the parameter {shared.name} is in two optimizers, {shared.one!r} and "
            f"{shared.other!r}, and an update with both would change it twice: list "
            f'using("{shared.one}") or using("{shared.other}") in the pipeline of this step, or '
            "leave the parameter out of one"
        )


def explain_untrained(model: nn.Module, optimizers: Iterable[Optimizer]) -> str | None:
    """Return which parameters of a model need gradients and are in no optimizer; None: none."""
    given = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    left = [strip_compile_prefix(name) for name, p in trained.items() if id(p) not in given]
    if not left:
        return None
    many = len(left) > 1
    return (
        f"{'these parameters are' if many else 'this parameter is'} in no optimizer: "
        f"{join_names(left)}. Give {'them' if many else 'it'} to one, or freeze "
        f"{'them' if many else 'it'}: requires_grad_(False). Make the optimizers after the "
        "model, and after any change of its parameters"
    )


# --------------------------------------------------------------------------------------------------
# Numbers of parameter groups that middleware set before each update, such as learning rates.

Rate = float | Tensor
_TUPLES = ("betas",)  # settings whose parts are numbers
RATIO = f"{SCHEDULED}ratio"  # what plateau multiplies a learning rate by, and its lowest rate


def number_in(group: Mapping[str, Any], field: str) -> Any:
    """Return a number of a parameter group, or None if it has none.

    Args:
        group: the group.
        field: the key of the number; "betas.0" is the first of the tuple ``group["betas"]``.

    Returns:
        The number: a float, or a tensor where the optimizer is capturable.

    Example:
        >>> number_in({"betas": (0.9, 0.99)}, "betas.1")
        0.99
    """
    key, _, part = field.partition(".")
    value = group.get(key)
    if not part:
        return value
    if not isinstance(value, tuple | list) or not part.isdecimal() or int(part) >= len(value):
        return None
    return value[int(part)]


def set_number(group: Group, field: str, factor: Rate, owner: str, absolute: bool = False) -> None:
    """Set a number of a group to its initial value times a factor, or to a value.

    Args:
        group: the group. It keeps the initial value, as ``initial_lr``, and what was set.
        field: the key of the number, or of a part of a tuple.
        factor: the factor, or the value.
        owner: the middleware, for messages.
        absolute: whether it is the value.

    Raises:
        ValueError: there is no such number, or it was changed although its initial value was not.

    Example:
        >>> group = {"lr": 0.5}
        >>> for factor in (0.1, 2.0):
        ...     set_number(group, "lr", factor, "halved")
        ...     print(group["lr"], group["initial_lr"])
        0.05 0.5
        1.0 0.5
    """
    __tracebackhide__ = True
    initial, last = f"initial_{field}", SCHEDULED + field
    found = number_in(group, field)
    if initial not in group:
        group[initial] = _read_number(group, field)
    elif found is not group.get(last) and not _is_same(found, group.get(last)):
        if set_by_torch(group, field):  # in an earlier phase
            group[initial] = copy_number(initial_value(group, field))
        else:
            _check_unchanged(group, field, owner)
    number = factor if absolute else group[initial] * factor
    if field == "lr" and RATIO in group:
        ratio, lowest = group[RATIO]
        lowered = factor * ratio if absolute else group[initial] * (factor * ratio)
        number = lowered if lowest is None else _at_least(lowered, number, lowest)
    put_number(group, field, number)
    group[last], group[SCHEDULED + initial] = number_in(group, field), group[initial]


def _at_least(lowered: Rate, rate: Rate, lowest: float) -> Rate:
    """Return a lowered rate that is at least ``lowest``, unless the rate was lower already."""
    if isinstance(lowered, Tensor):  # which no comparison may read
        return lowered.maximum(torch.as_tensor(rate).clamp(max=lowest))
    return max(lowered, min(rate, lowest))


def numbers_used(groups: Mapping[str, Group], field: str) -> dict[str, Metric]:
    """Return a number of parameter groups as metrics: "lr", "lr/head", "lr/rest/1", ...

    Args:
        groups: the groups, as ``labelled_groups`` returns them.
        field: the key of the number. A group without one is left out.
    """
    return {
        f"{field}{label}": Last(copy_number(number_in(group, field)))
        for label, group in groups.items()
        if _is_number(number_in(group, field))
    }


def _check_unchanged(group: Group, field: str, name: str) -> None:
    """Raise if a group has a new value since the last update, but not a new initial value."""
    __tracebackhide__ = True
    found, last = number_in(group, field), group.get(SCHEDULED + field)
    initial = f"initial_{field}"
    if last is None or not _is_same(group[initial], group.get(SCHEDULED + initial)):
        return
    raise ValueError(
        f'{name}: group["{field}"] is {_format(found)}, but the schedule had set it to '
        f"{_format(last)}, and would overwrite it now. The schedule multiplies the initial value: "
        f'write group["{initial}"] = ..., and leave group["{field}"] as it was '
        f'(group["{field}"] = group["{SCHEDULED}{field}"]); or leave {name} out of the pipeline'
    )


def _is_same(value: Rate | None, other: Rate | None) -> bool:
    """Return whether two numbers are equal, or two tensors identical; no tensor is read."""
    tensors = isinstance(value, Tensor) or isinstance(other, Tensor)
    return value is other or (not tensors and bool(value == other))


def _format(value: Rate) -> str:
    if isinstance(value, Tensor):  # a host read, for the error that ends the run
        return f"the tensor {value.item():g}" if value.numel() == 1 else "a tensor"
    return f"{value:g}"


def _read_number(group: Group, field: str) -> Rate:
    """Return a copy of a number of a group, or raise if the group has no such number."""
    value = number_in(group, field)
    if not _is_number(value):
        keys = [k for k, v in group.items() if _is_number(v)]
        keys += [f"{k}.{i}" for k, v in group.items() if k in _TUPLES for i in range(len(v))]
        known = [k for k in keys if not k.startswith(("initial_", SCHEDULED))]
        raise ValueError(
            f"schedule(..., field={field!r}): the optimizer's groups have no such number; they "
            f"have {', '.join(known)}"
        )
    return copy_number(value)


def _is_number(value: object) -> bool:
    if value.__class__ is float:  # nearly always; the check of an abstract class takes longer
        return True
    return isinstance(value, Real | Tensor) and not isinstance(value, bool)


def copy_number(value: Any) -> Rate:
    return value.clone() if isinstance(value, Tensor) else value


def as_number(value: object) -> object:
    """Return a floating scalar tensor as a number, and any other value as it is.

    Optimizers keep such numbers in tensors, so that they can be changed on the device. A float32
    becomes the shortest number that converts back to it.

    Example:
        >>> torch.tensor(0.1).item(), as_number(torch.tensor(0.1))
        (0.10000000149011612, 0.1)
    """
    if not isinstance(value, Tensor) or value.ndim or not value.is_floating_point():
        return value
    if value.dtype is not torch.float32:
        return value.item()
    return float(str(value.detach().cpu().numpy()))


def put_number(group: Group, field: str, value: Rate) -> None:
    """Set a number of a group to a value; a tensor stays the same tensor."""
    current = number_in(group, field)
    key, _, part = field.partition(".")
    if isinstance(current, Tensor):
        # The tensor of a capturable optimizer. Unlike copy_, fill_ does not wait for the device.
        current.fill_(value)
    elif part:
        kept = group[key]
        group[key] = type(kept)(value if i == int(part) else v for i, v in enumerate(kept))
    else:
        group[field] = value


# --------------------------------------------------------------------------------------------------
# Optimizers with modes, such as schedule-free ones: other weights in evaluation than in training.
#
# Their method `eval` replaces the weights by averages, and `train` goes back, but only up to
# rounding. So what reads the weights of an evaluation has those of training restored exactly.


@attrs.frozen
class Modes(View):
    """The view of an optimizer with modes: its weights for an evaluation."""

    optimizer: Handle  # with the methods train and eval

    def changes(self, state: State) -> Sequence[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @contextlib.contextmanager
    def show(self, state: State) -> Iterator[nn.Module]:
        """Switch to the mode of evaluation. Afterwards the optimizer is as it was."""
        optimizer = self.optimizer
        held = [(own, {*own}) for own in optimizer.state.values()]
        settings = [(group, dict(group)) for group in optimizer.param_groups]
        flags = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool)}
        try:
            optimizer.eval()
            yield state.model
        finally:
            for own, names in held:  # eval may keep the weights to train with there
                for name in own.keys() - names:
                    del own[name]
            for group, before in settings:
                group.update(before)
            vars(optimizer).update(flags)

    def begin_again(self, state: State) -> None:
        self.optimizer.eval()  # so what comes next is what an evaluation uses


def modes_of(optimizer: Handle) -> list[Modes]:
    """Return the views of the optimizers that have modes."""
    return [Modes(one) for one in optimizers_in(optimizer).values() if _has_modes(type(one))]


@functools.cache
def _has_modes(optimizer: type) -> bool:
    return has_methods(optimizer, "train", "eval")


def to_training(optimizer: Handle) -> None:
    """Switch the optimizers that have modes to that of training."""
    for modes in modes_of(optimizer):
        modes.optimizer.train()
