"""The model in checkpoints: saved, compared, judged, and loaded as a whole or left as it was."""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import attrs
import torch
from torch import Tensor, nn

from fnloop._core.parts import Load
from fnloop._core.state import TrainState, unwrap
from fnloop._core.view import changed_for, is_apart, view
from fnloop._extensions.checkpoints.format import (
    TRAINED,
    TRAINING,
    TRAINING_FORMAT,
    CheckpointError,
    log,
)
from fnloop._extensions.checkpoints.partial import held_parts
from fnloop._extensions.checkpoints.serialize import (
    PAIRS,
    Json,
    as_safetensor,
    decode,
    encode,
    flattened_kind,
    from_safetensor,
)
from fnloop._extensions.checkpoints.shapes import Shapes, take_shapes
from fnloop._extensions.checkpoints.torch_compat import (
    is_extra_state,
    loads_by_itself,
    loads_other_names,
)
from fnloop._extensions.checkpoints.transfer import Collecting, Reading
from fnloop.extend import (
    Ownership,
    Part,
    checks,
    collectives,
    containers,
    fsdp,
    groups,
    is_sharded,
    local_part,
    optimizers,
    torch_compat,
)

Named = dict[str, Json]  # name to tensor, or to other values

# --------------------------------------------------------------------------------------------------
# The model: saved with the weights that an evaluation uses, loaded as a whole or left as it was.

BLOCK = 1 << 20  # elements that are exchanged at a time
COPIED = 16 << 20  # bytes of a model of which a copy is kept, which takes half as long


def _save_model(saving: Collecting) -> dict[str, Json]:
    """Save the model with the weights that an evaluation uses.

    With the optimizers, those of training get a file of their own if they may be others.
    """
    module, model, trained = unwrap(saving.state), saving.groups["model"], TRAINED in saving.parts
    saving.learning = _learning(module)
    others = changed_for(saving.state, "save")
    with view(saving.state, "save"):
        facts = _encode_module(saving)
        if not others:
            return facts
        own = {id(t) for t in (*module.parameters(), *module.buffers())}
        names = [  # also of what the module computes from its weights
            name
            for spelled, value in module.state_dict(keep_vars=True).items()
            if (name := torch_compat.strip_compile_prefix(spelled)) in model
            and (id(value) in others or id(value) not in own)
        ]
        model |= {name: model[name].clone() for name in names}
    if "optimizer" not in saving.parts or is_apart(saving.state):  # each process has its own
        return facts
    found: dict[str, Tensor] = {}
    with view(saving.state, "train"):
        _encode_model(module, found, {}, trained)
    saving.groups[TRAINING] = {name: found[name] for name in names}
    saving.require(TRAINING_FORMAT)
    return facts | {TRAINING: True}


def _encode_module(saving: Collecting) -> dict[str, Json]:
    """Return the facts of the model with the weights that it has now.

    Raises:
        TypeError, ValueError: something cannot be saved, or what is trained would be missing.
    """
    module, model, trained = unwrap(saving.state), saving.groups["model"], TRAINED in saving.parts
    facts = _encode_model(module, model, saving.tensors, trained)
    if "optimizer" in saving.parts:
        _check_complete(saving.state, model)
    grown = {} if trained else _grown_buffers(saving.state, model)
    return {"model": {**facts, **({"grown": grown} if grown else {})}}


def _check_complete(state: TrainState, saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError if a parameter that is trained is not among the tensors of its model."""
    module = unwrap(state)
    names = [(torch_compat.strip_compile_prefix(name), p) for name, p in module.named_parameters()]
    missing = [(name, p) for name, p in names if name not in saved and p.requires_grad]
    if not missing:
        return
    trained = {id(p) for group in groups(state).values() for p in group["params"]}
    storages = {local_part(t).untyped_storage().data_ptr() for t in saved.values()}
    left = [
        name
        for name, p in missing
        if id(p) in trained and local_part(p).untyped_storage().data_ptr() not in storages
        if not loads_other_names(module, name)
    ]
    if left:
        raise ValueError(
            f"the state_dict of {type(module).__name__} leaves out {checks.join_names(left)}, "
            "which is trained, so a run could not be resumed: let it return all that is trained, "
            'or save without the optimizer, only=("model", ...)'
        )


def _encode_model(
    module: nn.Module, tensors: dict[str, Tensor], others: dict[str, Tensor], trained: bool
) -> dict[str, Json]:
    """Return the facts of the model. Tensors of its extra state are added to ``others``.

    With ``trained``, only the parameters that require gradients are saved.
    """
    extra, pairs = {}, []
    learning = _learning(module) if trained else ()
    if trained and not learning:
        raise ValueError('only=("trained",) saves the parameters that require gradients; none does')
    for spelled, value in module.state_dict().items():
        name = torch_compat.strip_compile_prefix(spelled)
        if trained and name not in learning:
            continue
        if isinstance(value, Tensor):
            tensors[name] = as_safetensor(value, f"model.{name}")
            pairs += [name] if value.dtype in PAIRS else []
        else:  # from the module's get_extra_state
            extra[name] = encode(value, others, f"model.{name}")
    facts = {
        "class": type(module).__name__,
        "extra_state": extra,
        **({"complex": pairs} if pairs else {}),
    }
    if trained:
        return facts
    evaluating = [name for name, m in module.named_modules() if not m.training]
    return {
        **facts,
        "frozen": [name for name, p in _parameters(module) if not p.requires_grad],
        "evaluating": list(map(torch_compat.strip_compile_prefix, evaluating)),
    }


@attrs.frozen(eq=False)
class Difference:
    """How what was saved of a model differs from the model, by names without prefixes.

    Args:
        theirs: what was saved.
        mine: what the model has.
        made: what is to be given to the model first, because it takes its shape from the file.
        resized: the names of what the model takes in any shape by itself.
        missing: the names that are only in the model.
        unknown: the names that are only in the checkpoint.
        shapes: the names of tensors of another shape, but those above.
        dtypes: the names of tensors of another dtype.
    """

    theirs: Named
    mine: Named
    made: Mapping[str, Tensor]
    resized: Collection[str]
    missing: Sequence[str]
    unknown: Sequence[str]
    shapes: Sequence[str]
    dtypes: Sequence[str]

    @property
    def fitting(self) -> Named:
        """What was saved and can be loaded, by name."""
        known = {*self.mine, *self.made} - {*self.shapes}
        return {name: value for name, value in self.theirs.items() if name in known}

    def explain(self, *kinds: str) -> str:
        """Return what differs of some kinds, in words; an empty text if nothing does."""
        texts = {
            "missing": ("missing in the checkpoint", self.missing),
            "unknown": ("not in the model", self.unknown),
            "shapes": ("of another shape", self._both(self.shapes, lambda t: tuple(t.shape))),
            "dtypes": ("of another dtype", self._both(self.dtypes, lambda t: t.dtype)),
        }
        found = (texts[kind] for kind in kinds)
        return "; ".join(f"{what}: {checks.join_names(which)}" for what, which in found if which)

    def _both(self, names: Sequence[str], fact: Callable[[Tensor], object]) -> list[str]:
        return [f"{k}: {fact(self.theirs[k])} saved, {fact(self.mine[k])} here" for k in names]


def diff(
    theirs: Named,
    mine: Named,
    made: Mapping[str, Tensor] = MappingProxyType({}),
    resizes: Callable[[str], bool] = lambda name: False,
) -> Difference:
    """Return how what was saved of a model differs from the model.

    Args:
        theirs, mine: name to tensor, or to what an extra state is.
        made: the tensors whose shapes the model takes from the file.
        resizes: whether the model takes a tensor of this name in another shape by itself.
    """
    compared = [
        name
        for name, here in mine.items()
        # Extra state may be of any shape: only its module knows what it takes.
        if isinstance(here, Tensor) and isinstance(theirs.get(name), Tensor)
        if name not in made and not is_extra_state(name)
    ]
    others = [name for name in compared if theirs[name].shape != mine[name].shape]
    resized = {name for name in others if resizes(name)}
    return Difference(
        theirs, mine, made, resized,
        missing=[name for name in mine if name not in theirs],
        unknown=[name for name in theirs if name not in mine and name not in made],
        shapes=[name for name in others if name not in resized],
        dtypes=[k for k in compared if k not in resized and theirs[k].dtype != mine[k].dtype],
    )  # fmt: skip


def judge(found: Difference, saved: Reading) -> None:
    """Raise CheckpointError if a model differs too much; say what is left as it is.

    With the counters, the dtypes must be the same too; weights alone may be cast.
    """
    part = TRAINED if TRAINED in saved.parts else "model"
    kinds = ["unknown", "shapes"]
    if part == TRAINED:
        _warn_of_untrained(unwrap(saved.state), found.missing)
    else:
        kinds = ["missing", *kinds, *(["dtypes"] if "counters" in saved.parts else [])]
    text = found.explain(*kinds)
    if text and saved.strict:
        take = ""
        if found.explain("shapes") == text:
            take = 'take the shapes of the file, with shapes="file", '
        raise CheckpointError(
            f"{saved.path} is of another model ({saved.facts['model']['class']}). {text}. Create "
            f"the same model, {take}or restore what matches: "
            f"restore(path, state, only=('{part}',), strict=False)"
        )
    if text:
        log.warning("restore: left unchanged: %s", text)


def _prepare_model(saved: Reading) -> Load:
    """Check that the saved model fits, and return how to load it."""
    module = unwrap(saved.state)
    _check_sizes(module, saved.path)
    theirs, own = _saved_model(saved), module.state_dict()
    found = _compare(saved, module, theirs, own)
    if saved.shapes == "file" and found.shapes:
        _take_shapes(saved, module, {name: theirs[name].shape for name in found.shapes})
        own = module.state_dict()
        found = _compare(saved, module, theirs, own)
    judge(found, saved)
    spelled = {torch_compat.strip_compile_prefix(key): key for key in own}
    values = {
        spelled.get(k, k): _shard_like(v, found.mine.get(k)) for k, v in found.fitting.items()
    }
    _check_ties(saved, module, values, own)
    return functools.partial(_load_model, saved, found.made, values)


def _compare(
    saved: Reading, module: nn.Module, theirs: Named, own: Mapping[str, object]
) -> Difference:
    """Return how what was saved of a model differs from it, and from its state_dict, ``own``."""
    spelled = {torch_compat.strip_compile_prefix(key): key for key in own}
    return diff(
        theirs,
        {name: own[key] for name, key in spelled.items()},
        _grown_alike(saved, theirs),
        lambda name: _resizes(module, spelled[name], theirs[name]),
    )


def _take_shapes(saved: Reading, module: nn.Module, shapes: Shapes) -> None:
    """Give tensors of the model the shapes of the file, until there is an exception.

    Raises:
        CheckpointError: they cannot take them, or an optimizer that is not restored keeps what
            would not fit.
    """
    note_buffers(saved.state)
    own = {
        torch_compat.strip_compile_prefix(name): value
        for name, value in module.state_dict().items()
    }
    both = [f"{k}: {tuple(v)} saved, {tuple(own[k].shape)} here" for k, v in shapes.items()]
    try:
        saved.resized.extend(saved.undone.enter_context(take_shapes(module, shapes)))
    except ValueError as error:
        raise CheckpointError(f"{saved.path}: {error}") from error
    if "optimizer" not in saved.parts:
        ids = {id(tensor) for tensor in saved.resized}
        for one in optimizers(saved.state).values():
            trained = {id(p) for group in one.param_groups for p in group["params"]}
            if one.state and not ids.isdisjoint(trained):
                raise CheckpointError(
                    f"{saved.path} has parameters of another shape ({checks.join_names(both)}), "
                    f"and {type(one).__name__} has a state for those here. Restore the optimizer "
                    "too, or make the state with a new optimizer"
                )


def _load_model(
    saved: Reading, made: Mapping[str, Tensor], values: Named, state: TrainState
) -> TrainState:
    """Load a model. With the counters, which parameters are frozen, and which modules evaluate."""
    module, facts, trained = unwrap(state), saved.facts["model"], TRAINED in saved.parts
    note_buffers(state)
    saved.undone.enter_context(_buffers_made(module, made, state.backend.device))
    saved.undone.enter_context(weights_kept_on_error(module, values))
    missing = module.load_state_dict(values, strict=False).missing_keys
    missing = [name for name in missing if name in values or not trained]
    if saved.strict and missing:
        raise CheckpointError(
            f"{saved.path}: the model took no value for {checks.join_names(missing)}: "
            "its hooks rename keys"
        )
    if "counters" in saved.parts and not trained:
        for name, p in module.named_parameters():
            trains = torch_compat.strip_compile_prefix(name) not in facts["frozen"]
            if trains != p.requires_grad:
                p.requires_grad_(trains)
        for name, submodule in module.named_modules():
            trains = torch_compat.strip_compile_prefix(name) not in facts["evaluating"]
            if trains != submodule.training:
                submodule.training = trains
    return state


def _saved_model(saved: Reading) -> Named:
    """Return what is to be restored of a model, by name."""
    # Not those that are on the device: the module may expect its extra state where it made it.
    kept, extra = saved.groups["slots"], saved.facts["model"]["extra_state"]
    found: Named = model_tensors(saved, training="optimizer" in saved.parts)
    found |= {name: decode(value, kept) for name, value in extra.items()}
    return _trained_parts(found, saved) if TRAINED in saved.parts else found


# --- buffers that have another shape than when the run began, or that were not there
#
# As a memory that grows, or a cache that the first batch makes: a new model of the same program has
# them as they were when the run began. So a checkpoint says how that was, and a restore into a
# model that has them so takes them from the file.


_BUFFERS = "buffers"  # the note of their shapes, by name, before the first run or restore


def note_buffers(state: TrainState) -> None:
    """Note the shapes of buffers before the first run or restore of a state."""
    Ownership.of(state).notes.setdefault(_BUFFERS, _shapes_of_buffers(unwrap(state)))


def _shapes_of_buffers(module: nn.Module) -> dict[str, torch.Size]:
    return {
        torch_compat.strip_compile_prefix(name): buffer.shape
        for name, buffer in module.named_buffers(remove_duplicate=False)
        if not nn.parameter.is_lazy(buffer)
    }


def _grown_buffers(state: TrainState, saved: Mapping[str, Tensor]) -> dict[str, Json]:
    """Return the saved buffers that had another shape, and which; None for those not there."""
    if (before := Ownership.of(state).notes.get(_BUFFERS)) is None:
        return {}
    now = _shapes_of_buffers(unwrap(state))
    grown = [name for name, shape in now.items() if name in saved and before.get(name) != shape]
    return {name: [*before[name]] if name in before else None for name in grown}


def _grown_alike(saved: Reading, theirs: Mapping[str, object]) -> dict[str, Tensor]:
    """Return the buffers that have grown in the saved run, if those here were as they were."""
    was: Mapping[str, Json] = saved.facts["model"].get("grown", {})
    module = unwrap(saved.state)
    before = Ownership.of(saved.state).notes.get(_BUFFERS, _shapes_of_buffers(module))
    return {
        name: value
        for name, shape in was.items()
        if isinstance(value := theirs.get(name), Tensor)
        and before.get(name) == (None if shape is None else torch.Size(shape))
        and not loads_other_names(module, name)
    }


_ABSENT = torch.empty(0)  # what stands for no buffer, where None is one without a value


@contextlib.contextmanager
def _buffers_made(
    module: nn.Module, values: Mapping[str, Tensor], device: torch.device
) -> Iterator[None]:
    """Give a module buffers of the shapes of values. Take them back if there is an exception."""
    named = module.named_modules() if values else ()
    owners = {torch_compat.strip_compile_prefix(name): owner for name, owner in named}
    before: list[tuple[nn.Module, str, Tensor | None]] = []
    try:
        for name, value in values.items():
            prefix, _, own = name.rpartition(".")
            owner, was = owners[prefix], torch_compat.buffers_of(owners[prefix]).get(own, _ABSENT)
            place = device if was is None or was is _ABSENT else was.device
            made = torch.empty(value.shape, dtype=value.dtype, device=place)
            owner.register_buffer(own, made)
            before.append((owner, own, was))
        yield
    except BaseException:
        for owner, own, was in before:
            if was is _ABSENT:
                delattr(owner, own)
            else:
                owner.register_buffer(own, was)
        raise


def _check_ties(
    saved: Reading,
    module: nn.Module,
    values: Mapping[str, object],
    own: Mapping[str, object],
) -> None:
    """Raise CheckpointError if tensors of the model that share memory have different values.

    Args:
        saved: what is restored.
        module: the model.
        values: what is to be loaded into it, by name.
        own: its state_dict.
    """
    shared = _shared_memory(own, values)
    torn = [names for names, pairs in shared if not _fit_together(pairs)]
    if is_sharded(module):  # each process compares what it holds
        torn = sorted({names for each in collectives.gather_from_all(torn) for names in each})
    if torn:
        names = [*map(torch_compat.strip_compile_prefix, torn[0])]
        copied = f"model.{names[-1]}.detach().clone()"
        if isinstance(operator.attrgetter(names[-1])(module), nn.Parameter):
            copied = f"nn.Parameter({copied})"
        others = f", and so do {len(torn) - 1} more groups of tensors" if torn[1:] else ""
        raise CheckpointError(
            f"{saved.path} has different values for {checks.join_names(names)}, which share memory "
            f"in this {type(module).__name__}{others}: only one of the values could be kept. "
            "Restore into a model that does not tie them. To make one, write model."
            f"{names[-1]} = {copied} before you make the optimizer"
        )


_Pair = tuple[Tensor, Tensor]  # a tensor of the model, and its new value


def _shared_memory(
    own: Mapping[str, object], values: Mapping[str, object]
) -> list[tuple[tuple[str, ...], list[_Pair]]]:
    """Return the names of tensors of a model that overlap in memory, and their new values."""
    storages: dict[object, list[tuple[int, int, str, _Pair]]] = {}
    if _have_own_memory(own.values()):  # most models
        return []
    for name, whole in own.items():
        new = values.get(name)
        if not (isinstance(whole, Tensor) and isinstance(new, Tensor)):
            continue
        here, there = local_part(whole), local_part(new)
        has_memory = here.layout is torch.strided and flattened_kind(here) is None
        if not has_memory or here.shape != there.shape or not here.numel() or 0 in here.stride():
            continue
        first, size = here.storage_offset(), here.element_size()
        last = first + sum((n - 1) * by for n, by in zip(here.shape, here.stride(), strict=True))
        memory = here.untyped_storage().data_ptr(), here.device
        found = int(first) * size, (int(last) + 1) * size, name, (here, there)
        storages.setdefault(memory, []).append(found)
    sharing: list[tuple[tuple[str, ...], list[_Pair]]] = []
    for tensors in storages.values():
        end = 0
        for start, stop, name, pair in sorted(tensors, key=lambda found: found[0]):
            if start < end:
                names, pairs = sharing.pop()
                sharing.append(((*names, name), [*pairs, pair]))
            else:
                sharing.append(((name,), [pair]))
            end = max(end, stop)
    return [group for group in sharing if len(group[1]) > 1]


def _have_own_memory(tensors: Iterable[object]) -> bool:
    """Return whether no two tensors are in one memory, as far as a look shows."""
    places: list[int] = []
    for tensor in tensors:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return False
        places.append(tensor.untyped_storage().data_ptr())
    return len({*places}) == len(places)


def _fit_together(pairs: Sequence[_Pair]) -> bool:
    """Return whether each tensor has its value, bit for bit, after all are put in one memory."""
    here, there = pairs[0]
    size = here.untyped_storage().nbytes()
    memory = torch.empty(size, dtype=torch.uint8, device=there.device).untyped_storage()
    placed: list[_Pair] = []
    for here, there in pairs:
        view = torch.empty(0, dtype=here.dtype, device=there.device)
        view.set_(memory, here.storage_offset(), here.shape, here.stride())
        placed.append((view.copy_(there), there.to(here.dtype)))
    return all(torch.equal(_bits(view), _bits(value)) for view, value in placed)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _check_sizes(module: nn.Module, path: Path) -> None:
    """Raise CheckpointError if the sizes of parameters are still to be decided by a batch."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, t in tensors if nn.parameter.is_lazy(t)]:
        raise CheckpointError(
            f"{path} cannot be restored into this {type(module).__name__}: the sizes of "
            f"{checks.join_names(lazy)} are not known yet. Call the model on a batch first: "
            "model(x)"
        )


def _resizes(module: nn.Module, name: str, there: Tensor) -> bool:
    """Return whether the owner of a buffer takes one of another shape, as fake quantization does.

    It is tried on a copy, which shares the parameters.
    """
    prefix, _, own = name.rpartition(".")
    owner = dict(module.named_modules()).get(prefix)
    if owner is None or not loads_by_itself(owner):  # None: state_dict has names of its own
        return False
    if own not in dict(owner.named_buffers(recurse=False)):
        return False
    try:
        trial = copy.deepcopy(owner, {id(p): p for p in owner.parameters()})
        trial.load_state_dict({own: there}, strict=False)
    except Exception as error:
        if containers.is_out_of_memory(error):
            raise
        return False  # it is refused, by name
    return trial.get_buffer(own).shape == there.shape


def _trained_parts(found: Named, saved: Reading) -> Named:
    """Return what a checkpoint holds of the parameters that required gradients."""
    if "model" not in held_parts(saved.facts):
        return found
    names = {*dict(_parameters(unwrap(saved.state)))} - {*saved.facts["model"]["frozen"]}
    return {name: value for name, value in found.items() if name in names}


def _warn_of_untrained(module: nn.Module, missing: Sequence[str]) -> None:
    """Warn if there are parameters to train that the checkpoint does not hold."""
    learning = _learning(module)
    if untrained := [name for name in missing if name in learning]:
        log.warning(
            "restore: not in the checkpoint, left unchanged: %s", checks.join_names(untrained)
        )


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return all parameters with their names, of which a tied one has several."""
    named = module.named_parameters(remove_duplicate=False)
    return [(torch_compat.strip_compile_prefix(name), p) for name, p in named]


def _learning(module: nn.Module) -> set[str]:
    """Return the names of the parameters that are trained."""
    return {name for name, p in _parameters(module) if p.requires_grad}


def model_tensors(saved: Reading, training: bool = False) -> dict[str, Tensor]:
    """Return the saved tensors of the model, those of pairs as complex numbers.

    Args:
        saved: what is restored.
        training: whether to return the weights to train with, where these are others.
    """
    tensors, pairs = saved.groups["model"], saved.facts.get("model", {}).get("complex", ())
    if training and saved.facts.get(TRAINING, False):
        others = saved.groups[TRAINING]
        if unknown := others.keys() - tensors.keys():
            raise KeyError(f"{min(unknown)} is a weight to train with, but not one of the model")
        tensors = {**tensors, **others}
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in tensors.items()
    }


def _shard_like(value: object, template: object) -> object:
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        return fsdp.like_sharded(value, template)
    return value


# --- all or nothing


@contextlib.contextmanager
def weights_kept_on_error(module: nn.Module, values: dict[str, object]) -> Iterator[None]:
    """Put the tensors of a module back if there is an exception.

    Of a small module, copies are kept. Otherwise the memory of the new values keeps the old ones,
    where that is possible: both are exchanged, and ``values`` then has the module's own tensors, to
    be loaded as if they were new.

    Args:
        module: the module.
        values: name to new value; changed in place.
    """
    # By the place in memory, because state_dict returns other tensors, of the same memory.
    own = {_place_of(t) for t in (*module.parameters(), *module.buffers())}
    undone: list[Callable[[], object]] = []
    before: dict[str, Tensor] = {}
    room = COPIED
    try:
        for name, here in module.state_dict().items():
            new = values.get(name)
            if not isinstance(here, Tensor):
                continue
            if not (isinstance(new, Tensor) and _place_of(here) in own):
                before[name] = here.clone()
            elif type(here) is Tensor and here.nbytes <= room and here.is_contiguous():
                undone.append(functools.partial(_put_back, here, here.clone()))
                room -= here.nbytes
            elif _may_exchange(here, new):
                _exchange(here, new)
                undone.append(functools.partial(_exchange, here, new))
                values[name] = here
            else:
                before[name] = here.clone()
        yield
    except BaseException:
        for undo in reversed(undone):
            undo()
        module.load_state_dict(before, strict=False)
        raise


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, torch.device]:
    local = local_part(tensor)
    return local.data_ptr(), local.shape, local.device


def _may_exchange(here: Tensor, new: Tensor) -> bool:
    a, b = local_part(here), local_part(new)
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return same and all(_fills_memory(t) and not t.is_conj() and not t.is_neg() for t in (a, b))


def _fills_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has its memory for itself, in any order of its dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _put_back(here: Tensor, was: Tensor) -> None:
    with torch.no_grad():
        here.copy_(was)


def _exchange(a: Tensor, b: Tensor) -> None:
    """Exchange the values of two tensors."""
    with torch.no_grad():
        for one, other in _blocks_of(local_part(a).detach(), local_part(b).detach()):
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)


def _blocks_of(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the pairs of parts of two tensors that are exchanged one after the other."""
    if a.is_contiguous() and b.is_contiguous():
        return zip(a.view(-1).split(BLOCK), b.view(-1).split(BLOCK), strict=True)
    # One is in another memory format, so it has dimensions.
    rows = max(1, BLOCK * len(a) // a.numel())
    return zip(a.split(rows), b.split(rows), strict=True)


MODEL = tuple(
    Part(of, _save_model, _prepare_model, _encode_module, of) for of in ("model", TRAINED)
)
