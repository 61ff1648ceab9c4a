"""The first difference between two states, checkpoints, histories or runs."""

from __future__ import annotations

import os
from pathlib import Path

import attrs

from fnloop._checkpoint.listing import Saved, is_one_checkpoint, read_history, saved_in
from fnloop._core.history import History
from fnloop._core.state import TrainState, check_not_stale
from fnloop._display import checks
from fnloop.debug._difference import (
    Difference,
    Finding,
    compare_contents,
    compare_histories,
    contents_of,
)

__all__ = ["common", "diff", "find_differing"]


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
        found = compare_contents(contents_of(one), contents_of(other))
        kinds = {isinstance(one, Path), isinstance(other, Path)}
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
    return path if is_one_checkpoint(path) else saved_in(path)


def _kind(value: object) -> str:
    if isinstance(value, list):
        return "a run"
    return "a checkpoint" if isinstance(value, Path) else f"a {type(value).__name__}"


def _compare_runs(a: list[Saved], b: list[Saved]) -> Difference:
    """Return the first record, the first checkpoint, and what differs in it."""
    found: list[Finding] = []
    record = compare_histories(*(read_history(run[-1].path) for run in (a, b)))
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
