"""``accumulate(total=...)``: the updates of a run do not depend on the number of processes."""

import attrs
import pytest
import torch
from launch import reads, written_by
from process_problems import (
    COUNTS,
    SIZE,
    Stream,
    batches,
    by_tokens,
    come_to,
    count,
    default_dtype,
    difference,
    entropy,
    items,
    kinds,
    loader,
    network,
    tally,
    world,
)

import fnloop as fl
from fnloop import schedules

pytestmark = pytest.mark.slow

TOTALS = (4, 8, 10)  # in batches of 2: on 3 processes one is idle, one has more, two have more
LOADERS = {
    "shuffled": lambda: loader(size=2, shuffle=True),
    "list": lambda: batches(2),
    "stream": lambda: loader(Stream(), size=2),
    "incomplete batch dropped": lambda: loader(size=2, shuffle=True, drop_last=True),
}
untouched = fl.Middleware(
    "untouched", gradient=lambda step: lambda state, batch: step(state, batch)
)
TRAINED = {
    "cosine": ([fl.clip(0.5), fl.schedule(schedules.cosine(warmup=2))], entropy),
    "tokens": ([fl.schedule(schedules.linear()), fl.clip(0.5)], by_tokens),
    "metrics": ([kinds()], entropy),
}


def train(members, loss, state=None, inner=(), epochs=2, **settings):
    """Train in double precision with 8 samples per update. Return the state and some facts."""
    seen = []

    def note(state):
        rate = state.optimizer.param_groups[0]["lr"]
        seen.append([state.step, state.epoch, state.batch, state.samples, rate])
        return state

    if state is None:
        state = fresh()
    step = fl.pipeline(*inner, fl.accumulate(total=8), *members)(loss)
    loaders = {"train": loader(size=2, shuffle=True), "valid": loader(size=9)}
    hooks = (fl.every(steps=1)(note), *settings.pop("hooks", ()))
    state = fl.fit(step, state, loaders, epochs=epochs, hooks=hooks, **settings)
    records = [dict(one.metrics) for one in state.history if not one.closing]
    return state, {**come_to(state), "seen": seen, "records": records}


def fresh():
    torch.manual_seed(0)
    model = network()
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.05), seed=0)


def totals(folder):
    """Return what runs with a total of samples come to."""
    found = {}
    for name, make in LOADERS.items():
        for total in TOTALS if name == "shuffled" else (8,):
            step = fl.pipeline(fl.accumulate(total=total), items())(count)
            state = fl.fit(step, tally(), make(), epochs=1, hooks=())
            found[f"{name}, {total}"] = [
                (-state.model.w).tolist(), state.step, state.history["train/items"],
            ]  # fmt: skip
    with default_dtype(torch.float64):
        for name, (members, loss) in TRAINED.items():
            found[name] = train(members, loss)[1]
        found["other path"] = train(*TRAINED["cosine"], inner=(untouched,))[1]

        def halt(state):
            return attrs.evolve(state, stop="half") if state.step == 8 else state

        halfway, _ = train(*TRAINED["cosine"], hooks=(halt,))
        fl.save(halfway, folder / "half")
    return found


@reads(totals, (2, 3))
def continued(folder):
    """Continue what another number of processes has begun, in the middle of an epoch."""
    before = {1: 3, 3: 2}[world()]
    path = written_by(totals, before, folder) / "half"
    with default_dtype(torch.float64):
        state = attrs.evolve(fl.restore(path, fresh()), stop=None)
        at = [state.step, state.epoch, state.batch]
        return {"at": at, **train(*TRAINED["cosine"], state)[1]}


@pytest.mark.parametrize("n", COUNTS)
def test_each_update_has_the_total_and_each_sample_is_in_one(launched, n):
    for mine in launched(totals, n):
        for name, total in [*((name, 8) for name in LOADERS), *(("shuffled", t) for t in TOTALS)]:
            shares, updates, (reported,) = mine[f"{name}, {total}"]
            size = SIZE - 1 if "dropped" in name else SIZE
            full, rest = divmod(size, total)
            expected = [0] * (SIZE - size) + [1 / total] * (size - rest)
            expected += [1 / rest] * rest if rest else []
            assert sorted(shares) == pytest.approx(sorted(expected), rel=1e-12), name
            assert updates == full + (rest > 0) and reported == pytest.approx(size, rel=1e-12)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("name", [*TRAINED, "other path"])
def test_a_run_does_not_depend_on_the_number_of_processes(launched, name, n):
    (alone,) = launched(totals, 1)
    assert alone[name]["counters"] == [12, 2, 0]
    for mine in launched(totals, n):
        assert_same(mine[name], alone[name])


@pytest.mark.parametrize("n", [1, 3])
def test_a_run_continues_on_another_number_with_the_same_updates(launched, n):
    (alone,) = launched(totals, 1)
    for mine in launched(continued, n):
        assert mine["at"] == [8, 1, 8]  # two updates of 4 batches into the second epoch
        assert_same(mine, {**alone["cosine"], "seen": alone["cosine"]["seen"][8:]})


def assert_same(found, expected):
    assert found["counters"] == expected["counters"]
    assert difference(expected["weights"], found["weights"]) < 1e-12
    assert [row[:-1] for row in found["seen"]] == [row[:-1] for row in expected["seen"]]
    assert [row[-1] for row in found["seen"]] == pytest.approx(
        [row[-1] for row in expected["seen"]], rel=1e-12
    )
    for mine, theirs in zip(found["records"], expected["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-10)
