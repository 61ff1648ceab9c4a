"""The first difference between two states, checkpoints, histories or runs."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs
import torch
from torch import Tensor

from fnloop._core.history import History
from fnloop._core.records import Record
from fnloop._core.state import TrainState
from fnloop._extensions.checkpoints.compare import (
    Measured,
    describe_value,
    find_difference,
    measure,
)
from fnloop._extensions.checkpoints.files import decode_history
from fnloop._extensions.checkpoints.format import CheckpointError, Contents
from fnloop._extensions.checkpoints.restore import read_alone
from fnloop._extensions.checkpoints.save import collect_contents
from fnloop._extensions.checkpoints.saved import Saved
from fnloop.extend import check_not_stale, checks, containers, on_main_process, reprs, tables


def diff(
    a: TrainState | History | str | os.PathLike[str],
    b: TrainState | History | str | os.PathLike[str],
) -> Difference:
    """Find the first difference between two states, checkpoints, histories or runs, bit for bit.

    Of two runs: the first record, then the first checkpoint that both have, then the first tensor
    in it. Of two states or checkpoints: the first record, counter, setting (such as a learning
    rate) and tensor, of the model, then the optimizer, then the slots. NaN is equal to NaN. Times,
    and the records with which a run ended between two others, are not compared.

    Args:
        a, b: two states, or the paths of two checkpoints, or one of each; or two histories; or the
            folders of two runs, which ``checkpoint(folder)`` wrote to.

    Returns:
        What differs, the first of each kind, and of a tensor how much: text, and HTML in a
        notebook. It is falsy if nothing differs.

    Raises:
        TypeError: the two cannot be compared.
        CheckpointError: there is no checkpoint, or it is damaged.
        StaleStateError: a state has been advanced.
        NotImplementedError: each process has a part of a state: of a sharded model, or by
            ``local_sgd``.

    Example:
        >>> import torch
        >>> from fnloop.testing import toy
        >>> print(diff(toy(w=1.0), toy(w=1.5)).tensor.text)
        1 of 1 elements differ, by up to 0.5; first: 1 and 1.5, 4,194,304 ulps apart
    """
    one, other = _read(a, "a"), _read(b, "b")
    if isinstance(one, History) and isinstance(other, History):
        found = compare_histories(one, other)
        return Difference(() if found is None else (found,), compared="histories")
    if isinstance(one, list) and isinstance(other, list):
        return _compare_runs(one, other)
    if isinstance(one, TrainState | Path) and isinstance(other, TrainState | Path):
        both = contents_of(one), contents_of(other)
        kinds = {isinstance(one, Path), isinstance(other, Path)}
        compare = functools.partial(compare_contents, *both)
        # Of a state of several processes the main one has all.
        found = on_main_process(compare, "fnloop.debug.diff") if False in kinds else compare()
        what = "states" if True not in kinds else "checkpoints" if len(kinds) == 1 else "the two"
        return attrs.evolve(found, compared=what)
    raise TypeError(
        "diff compares two states or checkpoints, two histories, or two runs; got "
        f"{_kind(one)} and {_kind(other)}"
    )


def _read(value: object, name: str) -> TrainState | History | Path | list[Saved]:
    """Return what was given: a state, a history, the path of a checkpoint, or those of a run."""
    if isinstance(value, TrainState):
        check_not_stale(value, "diff")
        return value
    if isinstance(value, History):
        return value
    if not isinstance(value, str | os.PathLike):
        raise TypeError(
            f"diff expects {name} as a state, a history, or the path of a checkpoint or of a run; "
            f"got {checks.describe(value)}"
        )
    path = checks.folder_path("diff", name, value)
    return path if Saved.is_at(path) else Saved.all_in(path)


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a run"
    return "a checkpoint" if isinstance(value, Path) else f"a {type(value).__name__}"


def _compare_runs(a: list[Saved], b: list[Saved]) -> Difference:
    """Return the first record, the first checkpoint, and what differs in it."""
    found: list[Finding] = []
    record = compare_histories(*(run[-1].history(verified=True) for run in (a, b)))
    found += [] if record is None else [record]
    both = common(a, b)
    for mine, its in both:
        if inside := find_differing(mine, its):
            text = f"the first of {len(both)} that both runs have"
            found.append(Finding("checkpoint", f"step {mine.step}", text))
            found += inside.findings
            return Difference(tuple(found), inside.others, "runs")
    if not both and not found:
        text = "there is none of the same step in both runs"
        found.append(Finding("checkpoint", "all", text))
    return Difference(tuple(found), compared="runs")


def common(a: list[Saved], b: list[Saved]) -> list[tuple[Saved, Saved]]:
    """Return the checkpoints that two runs have at the same position, in the order of the runs."""
    others = {saved.position: saved for saved in b}
    return [(saved, others[saved.position]) for saved in a if saved.position in others]


def find_differing(a: Saved, b: Saved) -> Difference:
    """Return what differs in two checkpoints, but for their records."""
    one, other = (contents_of(saved.path, history=False) for saved in (a, b))
    return compare_contents(one, other, ("counters", "model", "optimizer", "slots"))


# --------------------------------------------------------------------------------------------------
# What differs between two states, checkpoints, histories or runs, and how much.

BITS = ("model", "optimizer")  # what a replay has to make again
_PARTS = ("history", "counters", "model", "optimizer", "slots", "extra")


@attrs.frozen
class Finding:
    """Something that differs.

    Args:
        kind: "record", "checkpoint", "counter", "setting" or "tensor".
        name: what it is, such as "model.0.weight".
        text: how it differs.
        measured: how much, if it is a tensor.
    """

    kind: str
    name: str
    text: str
    measured: Measured | None = None


@attrs.frozen(repr=False)
class Difference(tables.Shown):
    """What differs, the first of each kind: a table. It is falsy if nothing does.

    Args:
        findings: in this order: the first record; the first checkpoint; in the states, the first
            counter, setting and tensor.
        others: how many more tensors differ.
        compared: what was compared, in words.
        largest: by how much the elements of tensors differ at most.

    Example:
        >>> from fnloop.debug import diff
        >>> from fnloop.testing import toy
        >>> found = diff(toy(w=1.0), toy(w=1.5))
        >>> print(found.tensor.name, found.tensor.text)
        model.w 1 of 1 elements differ, by up to 0.5; first: 1 and 1.5, 4,194,304 ulps apart
        >>> found.tensor.measured.largest, bool(diff(toy(), toy()))
        (0.5, False)
    """

    findings: tuple[Finding, ...] = ()
    others: int = 0
    compared: str = "states"
    largest: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.findings)

    def _first(self, kind: str) -> Finding | None:
        return next((finding for finding in self.findings if finding.kind == kind), None)

    @property
    def record(self) -> Finding | None:
        """The first record that differs, if one does."""
        return self._first("record")

    @property
    def checkpoint(self) -> Finding | None:
        """The first checkpoint of two runs that differs, if one does."""
        return self._first("checkpoint")

    @property
    def tensor(self) -> Finding | None:
        """The first tensor that differs, if one does."""
        return self._first("tensor")

    def _parts(self) -> list[str | tables.Table[Finding]]:
        title = f"{self.compared} {'differ' if self.findings else 'are equal, bit for bit'}"
        columns: list[tables.Column[Finding]] = [
            tables.Column("what", lambda f: f.kind, left=True),
            tables.Column("name", lambda f: f.name, left=True),
            tables.Column("difference", lambda f: f.text, left=True),
        ]
        others = f"and {reprs.format_count(self.others, 'more tensor')}" if self.others else ""
        return [title, tables.Table(columns, self.findings, others)] if self.findings else [title]


# --- records


def is_measured(name: str) -> bool:
    """Return whether a metric is a time or the like, which no two runs have equal."""
    return not {*Record.COSTS}.isdisjoint(name.split("/")[:2])


def compare_histories(a: Iterable[Record], b: Iterable[Record]) -> Finding | None:
    """Return the first record that differs. Times and closing records are not compared."""
    one, other = (History(each).since(closing=False) for each in (a, b))
    for i, (mine, its) in enumerate(zip(one, other, strict=False)):
        place = f"record {i}, step {mine.step}"
        if (mine.epoch, mine.step) != (its.epoch, its.step):
            at = (f"epoch {r.epoch}, step {r.step}" for r in (mine, its))
            return Finding("record", place, " in one, and in the other ".join(at))
        for name in (*mine.metrics, *its.metrics):
            if is_measured(name):
                continue
            if name not in mine.metrics or name not in its.metrics:
                return Finding("record", place, f"{name} is in one, and not in the other")
            x, y = mine.metrics[name], its.metrics[name]
            if x != y and not (math.isnan(x) and math.isnan(y)):
                text = f"{name} is {x!r} in one, and {y!r} in the other, {abs(x - y):.3g} apart"
                return Finding("record", place, text)
    if len(one) != len(other):
        text = f"{reprs.format_count(len(one), 'record')} in one, and {len(other):,} in the other"
        return Finding("record", "history", text)
    return None


# --- states and checkpoints


def contents_of(source: TrainState | Path, history: bool = True) -> Contents:
    """Return what a checkpoint of a state has, or what one has that was saved.

    If there are several processes, the main one gets all that a state has.
    """
    if isinstance(source, Path):
        return read_alone(source, history=history)
    made = collect_contents(source)
    if made.index:
        raise NotImplementedError(
            "a state of which each process has a part, because the model is sharded or by "
            "local_sgd, cannot be compared: save it, and give the path of the checkpoint"
        )
    facts = json.loads(json.dumps(made.facts))
    rows = [json.loads(row) for row in made.history]
    return attrs.evolve(made, facts={**facts, "history": rows})


def compare_contents(a: Contents, b: Contents, parts: Sequence[str] = _PARTS) -> Difference:
    """Return what differs between the contents of two checkpoints."""
    found: list[Finding | None] = []
    if "history" in parts:
        found.append(compare_histories(_records(a), _records(b)))
    if "counters" in parts:
        names = (*TrainState.COUNTERS, "stop", "phases", "ends")
        found.append(_first_setting("counter", a, b, names))
    held = [part for part in parts if part not in ("history", "counters")]
    held += ["brought"] if "slots" in parts else []
    found.append(_first_setting("setting", a, b, held))
    tensors = [*compare_tensors(_tensors(a, parts), _tensors(b, parts))]
    found += tensors[:1]
    largest = max((f.measured.largest for f in tensors if f.measured), default=0.0)
    others = max(len(tensors) - 1, 0)
    return Difference(tuple(filter(None, found)), others, largest=largest)


def compare_saved(path: Path, made: Contents) -> Difference | None:
    """Return what differs in bits between a checkpoint and what was made again.

    None means that the checkpoint is damaged.
    """
    try:
        return compare_contents(contents_of(path, history=False), made, BITS)
    except CheckpointError:
        return None


def explain_not_made(run: str, script: str, step: int, found: Difference) -> str:
    """Return how a checkpoint of a run differs from what its script makes again, in words."""
    first = found.tensor or found.findings[0]
    return (
        f"{run} is not made again by {script}: at step {step}, {first.name} of its checkpoint is "
        f"not what it becomes again: {first.text}"
    )


def _records(contents: Contents) -> History:
    return decode_history(contents.facts.get("history", ()))


def _first_setting(kind: str, a: Contents, b: Contents, names: Sequence[str]) -> Finding | None:
    for name in names:
        text = find_difference(a.facts.get(name), b.facts.get(name), name)
        if text is not None:
            place = text.partition(" ")[0]
            return Finding(kind, place, text.removeprefix(place).strip())
    return None


def _tensors(contents: Contents, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the tensors of some parts by names such as "model.0.weight"."""
    groups = contents.groups
    found: dict[str, Tensor] = {}
    for part in ("model", "optimizer"):
        if part in parts:
            found |= {f"{part}.{name}": tensor for name, tensor in groups[part].items()}
    if "slots" in parts:
        for group in groups.keys() - {"model", "optimizer", "slots"}:
            found |= {f"{group}.{name}": tensor for name, tensor in groups[group].items()}
        kept = ("slots", "generators", "extra", *(p for p in ("metrics", "shares") if p in parts))
        found |= {n: t for n, t in groups["slots"].items() if n.split(".")[0] in kept}
    return found


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a strided tensor, on the host."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


def compare_tensors(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[Finding]:
    """Yield the values that differ, in the order of the first mapping.

    Args:
        a, b: name to tensor, or to a nested value with tensors in it.
    """
    for name in (*a, *(name for name in b if name not in a)):
        if name not in a or name not in b:
            yield Finding("tensor", name, "in one, and not in the other")
        elif (found := compare_values(a[name], b[name])) is not None:
            text, measured = found
            yield Finding("tensor", name, text, measured)


def compare_values(a: object, b: object) -> tuple[str, Measured | None] | None:
    """Return how two values differ: the first tensor in them that does, or the first other part."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype == b.dtype and a.shape == b.shape:
            measured = measure(a, b)
            return None if measured is None else (str(measured), measured)
        if a.dtype == b.dtype:
            return f"shape {tuple(a.shape)} in one, and {tuple(b.shape)} in the other", None
        return f"{describe_value(a)} in one, and {describe_value(b)} in the other", None
    pairs, parts = containers.pairs_of(a, b), [[*(containers.parts_of(x) or ())] for x in (a, b)]
    if pairs is not None and len(pairs) == len(parts[0]) == len(parts[1]):
        found = (compare_values(x, y) for _, x, y in pairs)
        return next(filter(None, found), None)
    text = find_difference(a, b, "it")
    return None if text is None else (text.removeprefix("it "), None)
