"""Save a state, once it is known that its optimizers would resume."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fnloop._core.history import History
from fnloop._core.state import TrainState, check_not_stale, unwrap
from fnloop._display.screen import warn_once
from fnloop._extensions.checkpoints.compare import find_difference
from fnloop._extensions.checkpoints.counters import Cursor
from fnloop._extensions.checkpoints.files import EncodedHistory
from fnloop._extensions.checkpoints.format import (
    COLLECTED,
    NEWER_FORMAT,
    PARTS,
    TRAINED,
    CheckpointError,
    Contents,
    keep_own_share,
    log,
)
from fnloop._extensions.checkpoints.named import (
    NamedOptimizer,
    copy_optimizer,
    update,
    walk_optimizers,
    without_side_effects,
)
from fnloop._extensions.checkpoints.optimizer import (
    SavedOptimizer,
    check_groups,
    encode_optimizer,
    prepare_load,
)
from fnloop._extensions.checkpoints.partial import read_parts
from fnloop._extensions.checkpoints.parts import (
    check_mapping,
    every_part,
    open_parts,
)
from fnloop._extensions.checkpoints.place import place_at
from fnloop._extensions.checkpoints.serialize import Json
from fnloop._extensions.checkpoints.transfer import Collecting
from fnloop._step.engine import engine_of
from fnloop._version import __version__
from fnloop.extend import Ownership, collectives, containers, optimizers

# --------------------------------------------------------------------------------------------------
# Save a state: collect everything that a run depends on, and write it as a checkpoint.
#
# The format is described in the module `format`. Objects that are not plain data are saved as their
# parts (see `serialize`). They are reconstructed when a new object of their kind is available: the
# slot of a middleware when its `init` has created one, a metric when the next batch brings one.

_tried: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def save(
    state: TrainState, path: str | os.PathLike[str], *, only: Sequence[str] | None = None
) -> Path | str:
    """Write a checkpoint: a folder that is either complete or absent.

    It is written to a temporary folder, flushed, and renamed. It has tensors in safetensors files
    (``model``, ``optimizer`` by parameter name, ``slots``), ``state.json``, and a manifest with
    checksums. There is no pickle in it, so loading it cannot execute code. Besides the module's
    state and the optimizer, it holds which parameters are frozen and which submodules are in
    evaluation mode, slots, running metrics, history, counters, generators, and ``state.extra``, for
    your own plain data. A slot may be plain data, tensors, an attrs record, an object with a
    ``state_dict``, or what a middleware or a hook saves with a part that it brings. A buffer that
    the run has made, or whose shape it has changed, is restored into a model that has it as it was
    when the run began; one with ``persistent=False`` is not saved. The records of a long history
    are written once, in the folder ``.records`` beside the checkpoints.

    Args:
        state: the newest state; it may be in the middle of an epoch.
        path: the folder to create, on a disk that all processes see; ``~`` is expanded. Or an
            address such as ``"s3://bucket/a"``, as in :func:`fnloop.checkpoint`. An existing
            checkpoint is replaced. Anything else that exists there is not touched.
        only: the parts to save, as ``restore`` names them; all of them by default. ``("model",)``
            is enough for evaluation and fine-tuning. ``("trained",)`` are the parameters that
            require gradients, without buffers: a few kilobytes for a large model with adapters. A
            run cannot be resumed from such a partial checkpoint.

    Returns:
        The absolute path. For an address, the address as a str.

    Raises:
        StaleStateError: the state has been advanced.
        CheckpointError: something in the state cannot be saved, or the path exists and is not a
            checkpoint.
        TypeError, ValueError: it is neither a path nor an address, or ``only`` names something
            else.
        ImportError: the package for such addresses is not installed.
        OSError: the disk is full, or another fault of the disk or of the network; what was there
            before is still there. If the upload has failed, the message says where the local copy
            is.
        RuntimeError: the processes have diverged: their weights differ. Nothing is saved.

    Example:
        >>> import tempfile
        >>> from fnloop import restore
        >>> from fnloop.testing import toy
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = save(toy(w=3.0), f"{folder}/a")
        ...     restore(path, toy()).model.w.item()
        3.0

    Notes:
        With several processes, all of them must call it, and the main process writes. If the model
        is sharded over them (``fully_shard``), or each process keeps the optimizer's state of its
        own parameters (ZeRO-1, distributed Muons), each process writes its own part.

        ``model.safetensors`` has the weights that an evaluation uses. Of a schedule-free optimizer
        those of training are others, which are in ``training.safetensors``. An average of the
        weights has its own file, such as ``ema.safetensors``, which loads into the plain module
        too. Of a sharded model, ``index.json`` says for each tensor which parts to concatenate
        along which dimension.
    """
    check_not_stale(state, "save")
    place = place_at("save", "path", path)
    parts = read_parts("save", only)
    if "optimizer" in parts:
        _warn_unless_resumable(state)
    return place.save(collect_contents(state, parts=parts), "fnloop.save")


def _warn_unless_resumable(state: TrainState) -> None:
    """Warn once if a run with the optimizers would not resume bit for bit. Weights can be saved."""
    every = optimizers(state).values()
    if not all(optimizer in _tried for optimizer in every):
        _tried.update(every)
        try:
            check_resumable(state)
        except CheckpointError as error:
            log.warning("save: %s", error)


def collect_contents(
    state: TrainState,
    encode_history: Callable[[History], EncodedHistory] = EncodedHistory.of_all,
    parts: Sequence[str] = PARTS,
) -> Contents:
    """Return the contents of a checkpoint of a state. The tensors are shared with the state.

    With several processes, all of them must call it. Each gets what it writes: the main process all
    of it, or each its part of tensors that are split over processes.

    Args:
        state: the state.
        encode_history: encodes the history, if its older records are in files next to the
            checkpoint.
        parts: the parts of the state to collect.

    Raises:
        CheckpointError: the state contains something that a checkpoint cannot.
        RuntimeError: the processes have different weights.
    """
    check_not_stale(state)
    engine_of(state).check_alike(state, COLLECTED)
    saving = Collecting(
        state=Ownership.leave_run(state), run=state.run, parts=parts, encode_history=encode_history
    )
    with _refusing():
        check_mapping("slots", state.slots)  # which the other parts look into
        facts = _encode_identity(saving)
        for part in every_part(parts, open_parts(state).values()):
            facts |= part.save(saving)
        facts |= {"brought": saving.brought} if saving.brought else {}
        facts |= {"format_version": saving.version, "blocks": list(saving.history.blocks)}
        contents = Contents(saving.groups, facts, saving.history.rest, learning=saving.learning)
        return keep_own_share(contents, state, saving.local)


def check_saveable(state: TrainState, parts: Sequence[str] = PARTS) -> None:
    """Raise if a state has something that no checkpoint can hold, or could not be resumed from one.

    Everything is encoded, and nothing is copied. With several processes, all of them must call it.

    Args:
        state: the state, with the slots of its run.
        parts: the parts of the state that will be saved.

    Raises:
        CheckpointError: it has; the message says where, in the words of a save.

    Example:
        >>> from pathlib import Path
        >>> import attrs
        >>> from fnloop.testing import toy
        >>> check_saveable(attrs.evolve(toy(), extra={"data": Path("a")}))
        Traceback (most recent call last):
        ...
        fnloop.CheckpointError: the state cannot be saved: extra.data is a ...
    """
    if "optimizer" in parts:
        check_resumable(state)
    check_encodable(state, parts)


def check_encodable(state: TrainState, parts: Collection[str]) -> None:
    """Do what :func:`check_saveable` does, without a trial of the optimizers.

    Raises:
        CheckpointError: there is something that no checkpoint can hold.
    """
    collectives.on_every_process(lambda: _encode_parts(state, [*parts]), COLLECTED)


def _encode_parts(state: TrainState, parts: Sequence[str]) -> None:
    saving = Collecting(state, parts)
    unfinished = any(map(nn.parameter.is_lazy, unwrap(state).parameters()))  # until a first batch
    with _refusing():
        check_mapping("slots", state.slots)
        for part in every_part(parts, open_parts(state).values()):
            if part.encode is not None and not (unfinished and part.of in ("model", TRAINED)):
                part.encode(saving)


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Raise CheckpointError for what a checkpoint cannot hold."""
    try:
        yield
    except (TypeError, ValueError, NotImplementedError) as error:
        raise CheckpointError(f"the state cannot be saved: {error}") from error
    except RecursionError as error:
        raise CheckpointError(
            "the state cannot be saved: it holds something that contains itself, or is nested too "
            "deeply"
        ) from error


def _encode_identity(saving: Collecting) -> dict[str, Json]:
    """Return what every checkpoint says about itself."""
    state, partial = saving.state, {*saving.parts} != {*PARTS}
    if partial:
        saving.require(NEWER_FORMAT)
    return {
        "format_version": saving.version,
        **({"parts": list(saving.parts)} if partial else {}),
        "versions": versions(),
        **({"made_with": dict(saving.run.live.made_with())} if saving.run is not None else {}),
        "run": state.run_id,
        "position": position_of(state),
        "processes": state.backend.contributors,
        **({"data_shares": state.backend.data_size} if state.backend.parts > 1 else {}),
        "measured": _measured(state),
        **({"phase": state.phases[-1].name} if state.phases else {}),
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {"fnloop": __version__, "torch": torch.__version__, "python": platform.python_version()}


def position_of(state: TrainState) -> list[int]:
    """Return what orders the checkpoints of a run: updates tried, epochs, batches."""
    return Cursor.of(state).place


def metrics_here(state: TrainState) -> Mapping[str, float]:
    """Return the metrics that were recorded at the newest boundary of a state; none, if none was.

    There are two records if the boundary had one, and the run ended there and evaluated the rest.
    """
    if "record" not in state.events:
        return {}
    newest = state.history[-1]
    before = state.history[-2] if newest.closing and len(state.history) > 1 else newest
    if before.step != newest.step or before.closing:
        return newest.metrics
    return {**before.metrics, **newest.metrics}


def _measured(state: TrainState) -> dict[str, str]:
    """Return the metrics that were recorded at this boundary. They rank checkpoints."""
    return {name: repr(value) for name, value in metrics_here(state).items()}


# --------------------------------------------------------------------------------------------------
# Try on a copy of an optimizer whether it resumes bit for bit, before the first update.
#
# An optimizer may keep what its updates depend on in attributes that its `state_dict` does not
# contain, or in objects that cannot be saved. The user would notice at the first checkpoint, or
# never. So a copy with other parameters is updated a few times, saved, and restored into a second
# copy. Both are updated further and must stay bit-identical. Nothing outside of the copies changes.

MANY = 200_000  # elements; of an optimizer of more, a copy has a cut parameter of each kind
EDGE = 4  # the largest size of a cut parameter in each dimension
BEFORE, AFTER = 3, 12  # updates before the save, and after the restore
_Kept = tuple[tuple[int, ...], float]  # the shape of a tensor, and its norm


class _Fault(Exception):
    """What differs in a resumed run, or cannot be saved."""


def check_resumable(state: TrainState) -> None:
    """Raise if a run with the optimizers of this state could not be resumed bit for bit.

    With several processes, all of them must call it. If it cannot be tried, a warning names the
    optimizer and the reason, once per class.

    Raises:
        CheckpointError: something in an optimizer cannot be saved, or is not restored; the message
            names it.

    Example:
        >>> from fnloop.testing import toy
        >>> check_resumable(toy())
    """
    if state.backend.world_size > 1:
        check_groups(state)
    for name, named in NamedOptimizer.of_state(state).items():
        _check_resumable(named, f" ({name!r})" if name else "", state)


def _check_resumable(named: NamedOptimizer, label: str, state: TrainState) -> None:
    backend = state.backend
    optimizer, processes = named.holder, backend.world_size
    named = attrs.evolve(named, optimizer=optimizer)
    own = named.has_own_state_dict
    if named.is_torch and not own:
        return
    if named.sharded and own:
        encode_optimizer(named, {})  # raises
    kept: dict[str, _Kept] = {}
    fault = obstacle = None
    try:
        with without_side_effects(backend.device):
            _try(named, backend.device, kept)
    except _Fault as found:
        fault = (
            f"{found}. Give it a state_dict and a load_state_dict with everything that its updates "
            "depend on, as plain data and tensors"
        )
    except Exception as error:
        obstacle = " ".join(f"{type(error).__name__}: {error}".split())
    fault = (_compare_kept(collectives.gather_from_all(kept)) if processes > 1 else None) or fault
    if fault:
        where = f" on {processes} processes" if processes > 1 else ""
        raise CheckpointError(
            f"a run with {named.class_name}{label}{where} cannot be resumed bit for bit: {fault}, "
            "or leave out the hook checkpoint"
        )
    if obstacle and backend.main and not named.is_torch:
        warn_once(
            f"could not try whether a run with {named.class_name}{label} resumes bit for bit "
            f"({obstacle}): compare a resumed run with an uninterrupted one"
        )


def _compare_kept(every: Sequence[Mapping[str, _Kept]]) -> str | None:
    """Return what differs between processes under one name, or None.

    They had the same gradients, so it must be equal, but for rounding. Where each process keeps its
    own part, a checkpoint would have one of the parts, and only the resumed run would show it.
    """
    for rank, other in enumerate(every):
        for name in filter(other.__contains__, every[0]):
            (shape, norm), (other_shape, other_norm) = every[0][name], other[name]
            close = math.isclose(norm, other_norm, rel_tol=1e-3) or math.isnan(norm)
            if shape != other_shape or not close:
                return (
                    f"processes 0 and {rank} each keep another part of the state under the name "
                    f"{name}, and a checkpoint has one of that name. Keep all of it in one process"
                )
    return None


def _try(named: NamedOptimizer, device: torch.device, kept: dict[str, _Kept]) -> None:
    """Save a copy of an optimizer, restore it into another, and compare what both come to.

    Args:
        named: the optimizer.
        device: the device of its parameters.
        kept: receives what the updates have changed of what the copy keeps.

    Raises:
        _Fault: they differ. Another exception: that cannot be tried.
    """
    one, two = _two_copies(named)
    saved = _begin(one, device, kept)
    _restore(two, saved, one.parameters())
    _continue(one, two, device)
    _compare(one, two)


def _two_copies(named: NamedOptimizer) -> tuple[NamedOptimizer, NamedOptimizer]:
    """Return two copies of an optimizer; of a large one, of the last parameter of each kind."""
    groups, only, edge = named.optimizer.param_groups, None, sys.maxsize
    if sum(p.numel() for group in groups for p in group["params"]) > MANY:
        kinds = {
            (i, p.ndim, p.dtype, p.requires_grad): named.names[id(p)]
            for i, group in enumerate(groups)
            for p in group["params"]
        }
        only, edge = {*kinds.values()}, EDGE
    return copy_optimizer(named, only, edge), copy_optimizer(named, only, edge)


def _begin(named: NamedOptimizer, device: torch.device, kept: dict[str, _Kept]) -> SavedOptimizer:
    """Make the updates before the save, and return what is saved after them."""
    named.train()
    saved = _save(named)
    before = _norms(saved)
    for number in range(BEFORE):
        update(named, number, device)
        saved = _save(named)
    # What an update does not change may be a copy of what another process updates.
    kept |= {name: norm for name, norm in _norms(saved).items() if before.get(name) != norm}
    return saved


def _restore(named: NamedOptimizer, saved: SavedOptimizer, weights: Mapping[str, Tensor]) -> None:
    for name, p in named.parameters().items():
        p.data.copy_(weights[name])
    try:
        prepare_load(named, saved)()
    except CheckpointError as error:
        raise _Fault(str(error).removeprefix("the checkpoint: ")) from error


def _continue(one: NamedOptimizer, two: NamedOptimizer, device: torch.device) -> None:
    """Make the updates after the restore, with both."""
    for number in range(BEFORE, BEFORE + AFTER):
        update(one, number, device)
        try:
            update(two, number, device)
        except Exception as error:
            if containers.is_out_of_memory(error):
                raise
            text = f"an update after a restore raises {type(error).__name__}: {error}"
            raise _Fault(text) from error
        if number == BEFORE:  # as a schedule does; the change must reach the updates
            for group in (*one.optimizer.param_groups, *two.optimizer.param_groups):
                if isinstance(group.get("lr"), float | Tensor):
                    group["lr"] /= 2


def _compare(one: NamedOptimizer, two: NamedOptimizer) -> None:
    """Raise if they differ. Caches have filled up again by now: what differs was not restored."""
    if fault := _unrestored(one, two):
        name, _, how = fault.partition(" ")
        text = f"its attribute {name} is not in its state_dict: a few updates after a restore, it "
        raise _Fault(text + how)
    a, b = _save(one), _save(two)
    fault = find_difference(one.parameters(), two.parameters(), "weights")
    if fault := fault or find_difference((a.facts, a.tensors), (b.facts, b.tensors), "state"):
        raise _Fault(f"a few updates after a restore, {fault}")


def _save(named: NamedOptimizer) -> SavedOptimizer:
    """Return an optimizer as the files of a checkpoint would contain it."""
    tensors: dict[str, Tensor] = {}
    try:
        facts = json.loads(json.dumps(encode_optimizer(named, tensors)))
    except (TypeError, CheckpointError) as error:
        raise _Fault(str(error)) from error
    whole = torch.contiguous_format
    copies = {k: t.resolve_conj().cpu().clone(memory_format=whole) for k, t in tensors.items()}
    return SavedOptimizer(facts, copies)


def _norms(saved: SavedOptimizer) -> dict[str, _Kept]:
    return {k: (tuple(t.shape), float(t.double().norm())) for k, t in saved.tensors.items()}


def _unrestored(one: NamedOptimizer, two: NamedOptimizer) -> str | None:
    """Return which attribute differs between two optimizers, and how; None if none does."""
    for a, b in zip(walk_optimizers(one.optimizer), walk_optimizers(two.optimizer), strict=True):
        restored = vars(b)
        for name, was in vars(a).items():
            kept = name in ("state", "param_groups")
            if not kept and (fault := _find_lost(was, restored.get(name), name)):
                return fault
    return None


def _find_lost(was: Any, now: Any, path: str) -> str | None:
    pairs = containers.pairs_of(was, now)
    if pairs is None:
        return find_difference(was, now, path)
    found = (_find_lost(a, b, f"{path}.{key}") for key, a, b in pairs)
    # Keys may be parameters or their ids, and torch adds defaults when it loads.
    if len(was) > len(now):
        return f"{path} is of length {len(was)} in one, and {len(now)} in the other"
    return next(filter(None, found), None)
