"""The optimizers of a state, one or several by name.

One optimizer has no name; here its name is "". So callers loop, and need not know how many there
are.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import attrs
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._backend.torch_compat import strip_compile_prefix
from fnloop._core.parts import State
from fnloop._core.settings import Group
from fnloop._core.types import View
from fnloop._display.checks import describe, has_methods, join_names

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
    """Return whether optimizers of a class evaluate the loss by themselves.

    Args:
        optimizer: the class.

    Returns:
        Whether their ``step`` cannot be called without a closure, as that of LBFGS.

    Example:
        >>> import torch
        >>> wants_closure(torch.optim.LBFGS), wants_closure(torch.optim.SGD)
        (True, False)
    """
    if issubclass(optimizer, Optimizers):
        return False
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


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
