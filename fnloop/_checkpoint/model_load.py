"""Load the saved model into a module, or leave the module as it was."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fnloop._backend.fsdp import like_sharded, local_part
from fnloop._backend.torch_compat import loads_by_itself, strip_compile_prefix
from fnloop._checkpoint.format import TRAINED, CheckpointError, Contents
from fnloop._checkpoint.parts import held_parts
from fnloop._core.serialize import decode, from_safetensor
from fnloop._core.snapshot import unwrap
from fnloop._core.state import TrainState
from fnloop._display.checks import join_names
from fnloop._display.log import log

__all__ = ["PreparedModel", "model_tensors", "prepare_model", "weights_kept_on_error"]

BLOCK = 1 << 20  # elements that are exchanged at a time


class PreparedModel:
    """How to load a model that fits.

    Args:
        fitting: what is loaded, by the names in the module.
        load: loads what :attr:`fitting` has then.
    """

    def __init__(
        self, fitting: dict[str, object], load: Callable[[Mapping[str, object]], None]
    ) -> None:
        self.fitting, self._load = fitting, load

    def __call__(self) -> None:
        """Load it."""
        self._load(self.fitting)


def prepare_model(
    contents: Contents, state: TrainState, parts: Sequence[str], strict: bool, path: Path
) -> PreparedModel:
    """Check that the saved model fits, and return how to load it.

    With the counters, it restores which parameters are frozen and which modules are in evaluation
    mode. Then the dtypes must be the same too; weights alone may be cast.

    Args:
        contents, state, parts, strict, path: as in ``restore_contents``.
    """
    module, facts = unwrap(state), contents.facts["model"]
    _check_sizes(module, path)
    trained = "model" not in parts
    flags = "counters" in parts and not trained
    frozen, evaluating = (facts[k] if flags else [] for k in ("frozen", "evaluating"))
    spelled = {strip_compile_prefix(key): key for key in module.state_dict()}
    mine = {strip_compile_prefix(key): value for key, value in module.state_dict().items()}
    extra = {name: decode(value, contents.slots) for name, value in facts["extra_state"].items()}
    saved = {**model_tensors(contents), **extra}
    if trained:
        saved = _trained_parts(saved, contents, module)
    resized = {k for k, here in mine.items() if _resizes(module, spelled[k], saved.get(k), here)}
    rest = ({k: v for k, v in tensors.items() if k not in resized} for tensors in (saved, mine))
    faults = _compare_models(*rest, dtypes=flags)
    if trained:
        _warn_of_untrained(module, faults.pop("missing in the checkpoint"))
    found = "; ".join(f"{what}: {join_names(which)}" for what, which in faults.items() if which)
    if found and strict:
        part = TRAINED if trained else "model"
        raise CheckpointError(
            f"{path} is of another model ({facts['class']}). {found}. Create the same model, or "
            f"restore what matches: restore(path, state, only=('{part}',), strict=False)"
        )
    if found:
        log.warning("restore: left unchanged: %s", found)
    fitting = {
        spelled[name]: _shard_like(value, mine[name])
        for name, value in saved.items()
        if name in resized or (name in mine and not _differ_in_shape(value, mine[name]))
    }

    def load(fitting: Mapping[str, object]) -> None:
        missing = module.load_state_dict(fitting, strict=False).missing_keys
        if trained:
            missing = [name for name in missing if name in fitting]
        if strict and missing:
            raise CheckpointError(
                f"{path}: the model took no value for {join_names(missing)}: its hooks rename keys"
            )
        if flags:
            for name, p in module.named_parameters():
                p.requires_grad_(strip_compile_prefix(name) not in frozen)
            for name, submodule in module.named_modules():
                submodule.training = strip_compile_prefix(name) not in evaluating

    return PreparedModel(fitting, load)


def _check_sizes(module: nn.Module, path: Path) -> None:
    """Raise CheckpointError if the sizes of parameters are still to be decided by a batch."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    if lazy := [name for name, t in tensors if nn.parameter.is_lazy(t)]:
        raise CheckpointError(
            f"{path} cannot be restored into this {type(module).__name__}: the sizes of "
            f"{join_names(lazy)} are not known yet. Call the model on a batch first: model(x)"
        )


def _resizes(module: nn.Module, name: str, there: object, here: object) -> bool:
    """Return whether the owner of a buffer takes one of another shape, as fake quantization does.

    It is tried on a copy, which shares the parameters.
    """
    if not _differ_in_shape(there, here):
        return False
    prefix, _, own = name.rpartition(".")
    owner = dict(module.named_modules()).get(prefix)
    if owner is None or not loads_by_itself(owner):  # None: state_dict has names of its own
        return False
    if own not in dict(owner.named_buffers(recurse=False)):
        return False
    try:
        trial = copy.deepcopy(owner, {id(p): p for p in owner.parameters()})
        trial.load_state_dict({own: there}, strict=False)
    except Exception:  # it is refused, by name
        return False
    return trial.get_buffer(own).shape == there.shape  # type: ignore[attr-defined]


def _trained_parts(
    saved: Mapping[str, object], contents: Contents, module: nn.Module
) -> dict[str, object]:
    """Return what a checkpoint holds of the parameters that required gradients."""
    if "model" not in held_parts(contents.facts):
        return dict(saved)
    names = {strip_compile_prefix(name) for name, _ in _parameters(module)}
    names -= {*contents.facts["model"]["frozen"]}
    return {name: value for name, value in saved.items() if name in names}


def _warn_of_untrained(module: nn.Module, missing: Sequence[str]) -> None:
    """Warn if there are parameters to train that the checkpoint does not hold."""
    learning = {strip_compile_prefix(name) for name, p in _parameters(module) if p.requires_grad}
    if untrained := [name for name in missing if name in learning]:
        log.warning("restore: not in the checkpoint, left unchanged: %s", join_names(untrained))


def _parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(module.named_parameters(remove_duplicate=False))


def _compare_models(
    saved: Mapping[str, object], mine: Mapping[str, object], dtypes: bool
) -> dict[str, list[str]]:
    """Return the differences between two models, by kind; dtypes only if asked for."""
    faults: dict[str, list[str]] = {
        "missing in the checkpoint": [name for name in mine if name not in saved],
        "not in the model": [name for name in saved if name not in mine],
        "of another shape": [],
        "of another dtype": [],
    }
    for name, here in mine.items():
        there = saved.get(name)
        if isinstance(there, Tensor) and isinstance(here, Tensor):
            if there.shape != here.shape:
                shapes = f"{tuple(there.shape)} saved, {tuple(here.shape)} here"
                faults["of another shape"].append(f"{name}: {shapes}")
            if there.dtype != here.dtype and dtypes:
                faults["of another dtype"].append(f"{name}: {there.dtype} saved, {here.dtype} here")
    return faults


def _differ_in_shape(a: object, b: object) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape


def model_tensors(contents: Contents) -> dict[str, Tensor]:
    """Return the saved tensors of the model, those of complex128 as such."""
    pairs = contents.facts.get("model", {}).get("complex", ())
    return {
        name: from_safetensor(tensor) if name in pairs else tensor
        for name, tensor in contents.model.items()
    }


def _shard_like(value: object, template: object) -> object:
    if isinstance(value, Tensor) and isinstance(template, Tensor):
        return like_sharded(value, template)
    return value


# --- all or nothing


@contextlib.contextmanager
def weights_kept_on_error(module: nn.Module, values: dict[str, object]) -> Iterator[None]:
    """Put the tensors of a module back if there is an exception.

    The memory of the new values keeps the old ones, where that is possible: both are exchanged, and
    ``values`` then has the module's own tensors, to be loaded as if they were new.

    Args:
        module: the module.
        values: name to new value; changed in place.
    """
    own = {_place_of(t) for t in (*module.parameters(), *module.buffers())}
    exchanged: list[tuple[Tensor, Tensor]] = []
    before: dict[str, Tensor] = {}
    try:
        for name, here in module.state_dict().items():
            new = values.get(name)
            if not isinstance(here, Tensor):
                continue
            if isinstance(new, Tensor) and _place_of(here) in own and _may_exchange(here, new):
                _exchange(here, new)
                exchanged.append((here, new))
                values[name] = here
            else:
                before[name] = here.clone()
        yield
    except BaseException:
        for here, new in reversed(exchanged):
            _exchange(here, new)
        module.load_state_dict(before, strict=False)
        raise


def _place_of(tensor: Tensor) -> tuple[int, torch.Size, torch.device]:
    local = local_part(tensor)
    return local.data_ptr(), local.shape, local.device


def _may_exchange(here: Tensor, new: Tensor) -> bool:
    a, b = local_part(here), local_part(new)
    same = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return same and all(t.is_contiguous() and not t.is_conj() and not t.is_neg() for t in (a, b))


def _exchange(a: Tensor, b: Tensor) -> None:
    """Exchange the values of two tensors."""
    with torch.no_grad():
        pairs = zip(*(local_part(t).detach().view(-1).split(BLOCK) for t in (a, b)), strict=True)
        for one, other in pairs:
            kept = one.clone()
            one.copy_(other)
            other.copy_(kept)
