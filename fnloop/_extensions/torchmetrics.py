"""Metrics of torchmetrics as metrics of fnloop."""

from __future__ import annotations

import copy
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.types import Aux
from fnloop.extend import Batch, Running, checks, containers, name_of

if TYPE_CHECKING:
    from torchmetrics import Metric as ForeignMetric
    from torchmetrics import MetricCollection

    Torchmetric = ForeignMetric | MetricCollection

COLLECTION_HINT = ', or give the collection a prefix: MetricCollection(..., prefix="my_")'


@attrs.frozen(eq=False)
class TorchMetric(Running):
    """A torchmetrics metric that fnloop can combine.

    Args:
        template: the metric that the user gave; never updated.
        inputs: the arguments of the updates still to be made, as long as ``seen`` is None.
        seen: a metric that has been updated with all inputs, owned by this record; or None.
        names: the names of the elements, if a metric computes a vector.
        exact: whether parts merge with the bits of a whole.
        later: a metric that has seen what follows on ``seen``, and is yet to be merged into it. It
            is that of the interval since the last record.
    """

    template: Torchmetric
    inputs: tuple[Arguments, ...] = ()
    seen: Torchmetric | None = None
    names: tuple[str, ...] | None = None
    exact: bool = False
    later: Torchmetric | None = None

    @property
    def key(self) -> str | None:
        """The name that a collection is kept under, if its metrics are to have their own names."""
        return key_of(self.template)

    @property
    def if_twice(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return COLLECTION_HINT if self.key is not None else ""

    def combine(self, other: TorchMetric) -> TorchMetric:
        __tracebackhide__ = True
        if self.seen is None and other.seen is None:
            return attrs.evolve(self, inputs=self.inputs + other.inputs)
        return self._having(copy.deepcopy(self._updated())).update_(other)

    def to_accumulator(self) -> TorchMetric:
        """Return a metric with the same content and no inputs left to be seen."""
        __tracebackhide__ = True
        return self if self.seen is not None else self._having(self._updated())

    def update_(self, other: TorchMetric) -> TorchMetric:
        """Combine in place, into the object of this one."""
        __tracebackhide__ = True
        seen = self._updated()
        if other.seen is not None:
            merge_(seen, other.seen)
        update_object_(seen, other.inputs)
        return self._having(seen)

    def add_to_both_(self, epoch: object, recent: object) -> tuple[TorchMetric, TorchMetric] | None:
        """Combine with the metrics of an epoch and of an interval, in place, with one update.

        Only that of the interval is updated. It is merged into that of the epoch when the next
        interval begins.

        Args:
            epoch: the metric of the epoch; None if it begins.
            recent: the metric of the interval since the last record; None if it begins.

        Returns:
            Both; None if each needs an update of its own.
        """
        __tracebackhide__ = True
        if not self.exact or self.seen is not None:
            return None
        if recent is None and (epoch is None or isinstance(epoch, TorchMetric)):
            return self._begin_interval_(epoch)
        if not isinstance(epoch, TorchMetric) or not isinstance(recent, TorchMetric):
            return None
        if epoch.later is None or epoch.later is not recent.seen:
            return None
        update_object_(epoch.later, self.inputs)
        return epoch, recent

    def _begin_interval_(self, epoch: TorchMetric | None) -> tuple[TorchMetric, TorchMetric]:
        """Return the metric of an epoch, and that of an interval, which has seen this one alone."""
        __tracebackhide__ = True
        if epoch is None or epoch.seen is None or epoch.later is None:
            later = self._updated()
            whole = fresh_copy(later) if epoch is None else epoch._updated()
        else:
            whole, later = epoch.seen, epoch.later
            absorb_(whole, later)
            update_object_(later, self.inputs)
        return attrs.evolve(self._having(whole), later=later), self._having(later)

    def compute(self) -> Any:  # a float, or floats by name
        __tracebackhide__ = True
        value = self._updated().compute()
        if not isinstance(value, Mapping):
            (numbers,) = _to_numbers([self._vector(value, self.template, self.names)])
            return numbers[0] if self.names is None else _named(self.names, numbers)
        if self.names is not None and all(map(_is_number, value.values())):
            raise ValueError(
                f"from_torchmetrics expects names for the elements of vectors; {self.key} computes "
                f"one number for each metric, and got {', '.join(self.names)}: leave out names"
            )
        vectors = [
            self._vector(part, name, None if _is_number(part) else self.names)
            for name, part in value.items()
        ]
        found: dict[str, float] = {}
        for name, numbers in zip(value, _to_numbers(vectors), strict=True):
            if _is_number(value[name]) or self.names is None:
                found[name] = numbers[0]
            else:
                found |= _named([f"{name}/{element}" for element in self.names], numbers)
        return found

    def _vector(self, value: object, of: object, names: tuple[str, ...] | None) -> Tensor:
        """Return a value that a metric has computed as a vector: of one number, or of the named.

        Raises:
            ValueError: it has another number of elements.
        """
        number = _is_number(value)
        shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        if names is None and not number:
            raise ValueError(
                f"a metric of a run is one number, but {of!r} computes {shape}. Choose a reduction "
                'in it, such as average="macro", or give one metric per number; the elements of a '
                'vector can have names: from_torchmetrics(..., names=("cat", "dog"))'
            )
        vector = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        vector = vector.reshape(1) if number else vector
        if names is not None and vector.shape != (len(names),):
            count: object = vector.numel()
            hint = f"Write {count} names in metric(...=from_torchmetrics(..., names=(...)))"
            if number:
                hint = "It is one number: leave out names"
            elif vector.ndim != 1:
                count = f"an array of shape {shape}"
                hint = "Choose a reduction in it, or look at it in the hook inspect"
            raise ValueError(
                f"from_torchmetrics expects names, one for each element of what {of!r} computes: "
                f"that is {count}; got {len(names)}: {', '.join(names)}. {hint}"
            )
        return vector

    def moved(self, device: torch.device) -> TorchMetric:
        """Return a metric whose inputs are on a device."""
        return attrs.evolve(self, inputs=containers.to_device(self.inputs, device))

    def to_cpu(self) -> TorchMetric:
        """Return a copy that can be sent to another process."""
        return self._having(copy.deepcopy(self._updated()).to("cpu"))

    def to_parts(self) -> Parts:
        """Return what has been seen, as plain data and tensors."""
        return states_of(self._updated())

    def from_parts(self, parts: Parts) -> TorchMetric:
        """Return a metric of the same template that has seen what :meth:`to_parts` returned."""
        seen = fresh_copy(self.template)
        load_states(seen, parts)
        return self._having(seen)

    def _having(self, seen: Torchmetric) -> TorchMetric:
        """Return a metric like this one that has seen what another object has."""
        return TorchMetric(self.template, seen=seen, names=self.names, exact=self.exact)

    def _updated(self) -> Torchmetric:
        """Return an object that has seen everything: the one held, or a new one."""
        __tracebackhide__ = True
        if self.seen is not None:
            return self.seen if self.later is None else merged(self.seen, self.later)
        return update_object_(fresh_copy(self.template), self.inputs)


# --- numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)


def _named(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    return dict(zip(names, numbers, strict=True))


def _to_numbers(vectors: Sequence[Tensor]) -> list[list[float]]:
    """Return the elements of vectors, with one read from the device."""
    if len(vectors) == 1 or all(vector.is_cpu for vector in vectors):
        return [[float(number) for number in vector.tolist()] for vector in vectors]
    device = vectors[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    numbers = torch.cat([vector.detach().to(device, dtype) for vector in vectors]).tolist()
    ends = itertools.accumulate(len(vector) for vector in vectors)
    return [numbers[end - len(vector) : end] for vector, end in zip(vectors, ends, strict=True)]


def names_in(function: object) -> list[str]:
    """Return the names of a collection's metrics, from a function for ``metric``, if known."""
    if not isinstance(function, from_torchmetrics) or function.names is not None:
        return []
    return [] if function.key is None else function.key.split(", ")


@attrs.frozen(repr=False)
class from_torchmetrics:
    """Make a metric function for ``metric`` from a metric or a MetricCollection of torchmetrics.

    Use it for metrics that are not a mean over batches (F1, AUROC, ...): the metric sees every
    batch and is computed once. The given object is a template: it is copied, never updated. Its
    argument checks read from the device; ``validate_args=False`` keeps a step free of host reads.

    A MetricCollection is updated once per batch, and its compute groups are kept. Without a name,
    ``metric(from_torchmetrics(collection, inputs))``, its metrics have their own names.

    Args:
        metric: a ``torchmetrics.Metric`` that computes one number, or a vector if there are names;
            or a ``torchmetrics.MetricCollection`` of such metrics.
        inputs: ``(aux, batch) -> arguments of metric.update``, a tuple.
        names: a name for each element of a vector, reported as "f1/cat"; None if there is none.

    Returns:
        A function ``(aux, batch) -> Metric``.

    Raises:
        ImportError: torchmetrics is not installed (the extra ``fnloop[torchmetrics]``).
        TypeError: ``metric`` is not a torchmetrics metric, ``inputs`` is not a function (aux,
            batch), or ``names`` are not names.
        ValueError: there are no names, or two are equal. At a report: the metric computes a
            different number of elements.

    Example:
        >>> import torch
        >>> from torchmetrics.classification import MulticlassF1Score
        >>> inputs = lambda aux, batch: (aux["output"], batch[1])
        >>> f1 = from_torchmetrics(MulticlassF1Score(3), inputs)
        >>> f1({"output": torch.eye(3)}, (None, torch.arange(3))).compute()
        1.0
    """

    metric: Torchmetric = attrs.field(eq=id)  # its own == returns another metric, not a bool
    inputs: Callable[[Aux, Batch], Arguments]
    names: Sequence[str] | None = attrs.field(default=None, kw_only=True)
    _exact: bool = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        try:
            from torchmetrics import Metric as ForeignMetric
            from torchmetrics import MetricCollection
        except ImportError as error:
            raise ImportError(
                "from_torchmetrics needs torchmetrics: pip install 'fnloop[torchmetrics]'"
            ) from error
        if not isinstance(self.metric, ForeignMetric | MetricCollection):
            raise TypeError(
                "from_torchmetrics expects a torchmetrics.Metric such as MulticlassF1Score(10), or "
                f"a MetricCollection; got {checks.describe(self.metric)}"
            )
        if self.key == "":
            raise ValueError("from_torchmetrics expects a MetricCollection of at least one metric")
        wanted = "a function (aux, batch) -> a tuple of the arguments of metric.update"
        checks.function("from_torchmetrics", "inputs", self.inputs, wanted, 2)
        if self.names is not None:
            object.__setattr__(self, "names", _check_element_names(self.names))
        object.__setattr__(self, "_exact", merges_exactly(self.metric))

    @property
    def key(self) -> str | None:
        """The names of the metrics of a collection, as one; None for a single metric."""
        return key_of(self.metric)

    @property
    def unseen(self) -> TorchMetric:
        """The metric, before it has seen a batch."""
        return TorchMetric(self.metric, names=self.names, exact=self._exact)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        names = "" if self.names is None else f", names={self.names!r}"
        metric = repr(self.metric) if self.key is None else f"MetricCollection({self.key})"
        return f"from_torchmetrics({metric}, {name_of(self.inputs)}{names})"

    def __call__(self, aux: Aux, batch: Batch) -> TorchMetric:
        __tracebackhide__ = True
        arguments = self.inputs(aux, batch)
        if not isinstance(arguments, tuple):
            raise TypeError(
                f"inputs of {self!r} must return a tuple of arguments for update; "
                f"got {type(arguments).__name__}"
            )
        detached = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        return attrs.evolve(self.unseen, inputs=(detached,))


def _check_element_names(names: Sequence[str]) -> tuple[str, ...]:
    expected = 'from_torchmetrics expects names as a tuple of names, such as ("cat", "dog")'
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(f"{expected}; got {checks.describe(names)}")
    for name in names:
        checks.metric_name("from_torchmetrics", "a name", name)
    if not names or len({*names}) < len(names):
        raise ValueError(f"{expected}, at least one and each once; got {checks.describe(names)}")
    return tuple(names)


# --------------------------------------------------------------------------------------------------
# Objects of torchmetrics: copies, updates, and merges of metrics and collections.
#
# What has no public name in torchmetrics 1.4 to 1.9 is used here only: `_to_sync`, `_update_count`,
# `_defaults` and `_reductions`.

Arguments = tuple[object, ...]  # of one call of Metric.update
Parts = dict[str, Any]


def key_of(template: Torchmetric) -> str | None:
    """Return the names of the metrics of a collection as one, or None for a single metric."""
    return ", ".join(map(str, template.keys())) if isinstance(template, nn.ModuleDict) else None


def _members(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return a metric, or those of a collection by name, without a copy of what a group shares."""
    if isinstance(metric, nn.ModuleDict):
        return cast("dict[str, ForeignMetric]", dict(metric.named_children()))
    return {"": metric}


def _metrics_in(metric: Torchmetric) -> Iterator[tuple[str, ForeignMetric, str | None]]:
    """Yield a metric, or those of a collection or a wrapper.

    Each comes with its path, and with the path of an earlier one whose states it shares, if there
    is one: they are of one compute group.
    """
    from torchmetrics import Metric as ForeignMetric

    if isinstance(metric, nn.ModuleDict):
        metric.items(copy_state=False)  # restores what a compute group shares
    earlier: dict[tuple[int, ...], str] = {}
    for path, module in metric.named_modules():
        if isinstance(module, ForeignMetric):
            states = tuple(map(id, module.metric_state.values()))
            yield path, module, earlier.get(states)
            if states:
                earlier.setdefault(states, path)


def fresh_copy(template: Torchmetric) -> Torchmetric:
    """Return a metric like the template that has seen nothing and does not synchronize.

    It computes its value whenever asked, without what torchmetrics does around ``compute`` to
    synchronize and to keep the value: that takes half as long as the computing.
    """
    seen = copy.deepcopy(template)
    seen.reset()
    for _, metric, _ in _metrics_in(seen):
        metric.sync_on_compute = False
        metric.compute_with_cache = False  # merge_state keeps a value that was computed before
        metric._to_sync = False
    for member in _members(seen).values():
        member.compute = getattr(member.compute, "__wrapped__", member.compute)
    return seen


def update_object_(metric: Torchmetric, inputs: tuple[Arguments, ...]) -> Torchmetric:
    """Update a metric with inputs, on their device."""
    __tracebackhide__ = True
    for arguments in inputs:
        device = next(iter(_members(metric).values())).device
        for argument in arguments:
            if isinstance(argument, Tensor) and argument.device != device:
                device = argument.device
                metric.to(device)
        metric.update(*arguments)
    return metric


# --- states as plain data


def states_of(metric: Torchmetric) -> Parts:
    """Return what a metric has seen, as plain data and tensors."""
    parts: Parts = {}
    for path, member, twin in _metrics_in(metric):
        parts[path] = (
            {"updates": member.update_count, "states": dict(member.metric_state)}
            if twin is None
            else {"like": twin}
        )
    own = parts.pop("", {})
    return own | ({"members": parts} if parts else {})


def load_states(metric: Torchmetric, parts: Parts) -> None:
    """Set what a metric has seen to what :func:`states_of` returned."""
    saved = {"": parts, **parts.get("members", {})}
    for path, member, _ in _metrics_in(metric):
        found = saved.get(path, {})
        found = saved[found["like"]] if "like" in found else found
        for name, value in copy.deepcopy(found.get("states", {})).items():
            setattr(member, name, value)
        member._update_count = found.get("updates", 0)


# --- merging


def merge_(metric: Any, other: Any) -> None:
    """Merge what another metric has seen."""
    pairs = [(metric, other)]
    if key_of(metric) is not None:
        as_they_are = {"keep_base": True, "copy_state": False}
        others = dict(other.items(**as_they_are))
        pairs = [(member, others[name]) for name, member in metric.items(**as_they_are)]
    for member, its_other in pairs:
        try:
            member.merge_state(its_other)
        except RuntimeError as error:
            error.add_note(
                f"{member!r} cannot be merged from parts; give fnloop one that can, or evaluate it "
                "in one process"
            )
            raise


# --- merging with the bits of a metric that has seen everything


@functools.cache
def _exact_merges() -> dict[object, Callable[..., object]]:
    """Return how a state is merged with that of a later metric, by its reduction."""
    from torchmetrics.utilities import dim_zero_cat, dim_zero_max, dim_zero_min, dim_zero_sum

    return {
        dim_zero_sum: torch.add,
        dim_zero_max: torch.maximum,
        dim_zero_min: torch.minimum,
        dim_zero_cat: operator.iadd,
    }


def merges_exactly(template: Torchmetric) -> bool:
    """Return whether a metric that has seen all inputs and one merged from parts are the same bits.

    They are if the metric says that an update depends on its inputs alone, and its states are
    counts, extremes, or lists. A sum of floating numbers depends on the order of the additions.
    """
    from torchmetrics import Metric as ForeignMetric

    members = _members(template).values()
    if sum(isinstance(module, ForeignMetric) for module in template.modules()) > len(members):
        return False  # a metric in a metric, which a reset may leave as it is
    return all(
        member.full_state_update is False
        and all(_is_exact(start, member._reductions[k]) for k, start in member._defaults.items())
        for member in members
    )


def _is_exact(start: object, reduction: object) -> bool:
    """Return whether a state that starts with a value merges exactly."""
    merge = _exact_merges().get(reduction)
    if not isinstance(start, Tensor):
        return merge is operator.iadd
    if merge is torch.add:
        return not (start.is_floating_point() or start.is_complex() or start.any())
    return merge in (torch.maximum, torch.minimum)


def merged(metric: Torchmetric, later: Torchmetric) -> Torchmetric:
    """Return a metric that has seen what two have, which merge exactly. Neither is changed."""
    kept: dict[int, object] = {}  # tensors are not copied: merging changes none
    for owner in _owners(metric).values():
        for state in owner.metric_state.values():
            kept |= {id(part): part for part in (state if isinstance(state, list) else [state])}
    found = copy.deepcopy(metric, kept)
    _add_states_(found, later)
    return found


def absorb_(metric: Torchmetric, later: Torchmetric) -> None:
    """Move to a metric what another has seen after it, which merge exactly."""
    _add_states_(metric, later)
    for owner in _owners(later).values():
        owner.reset()


def _add_states_(metric: Torchmetric, later: Torchmetric) -> None:
    """Add to the states of a metric those of a later one. No tensor is changed."""
    merges = _exact_merges()
    others = _members(later)
    for name, mine in _owners(metric).items():
        its = others[name]
        if mine.device != its.device:
            metric.to(its.device)
        for state, reduction in mine._reductions.items():
            setattr(mine, state, merges[reduction](getattr(mine, state), getattr(its, state)))
        mine._update_count += its.update_count


def _owners(metric: Torchmetric) -> dict[str, ForeignMetric]:
    """Return the members whose states the others of their compute group share."""
    members = _members(metric)
    groups = metric.compute_groups if isinstance(metric, nn.ModuleDict) else {}
    return {group[0]: members[group[0]] for group in groups.values()} or members
