"""Records between evaluations: ``fit(..., record_every=...)``.

With ``w = 1`` and a learning rate of 0, the loss of a batch is its mean.
"""

import attrs
import pytest
import torch

import fnloop as fl
from fnloop import at_end, every, when
from fnloop.extend import Metrics
from fnloop.testing import toy, toy_loss

BATCHES = [torch.tensor(x) for x in ([1.0], [4.0, 4.0], [10.0], [2.0, 6.0], [7.0])]


NAN = torch.tensor([float("nan")])
ALWAYS = when(lambda state: True)


def train(*middleware, state=None, loaders=None, **settings):
    step = fl.pipeline(*middleware)(toy_loss)
    state = state or toy(w=1.0, lr=0.0)
    return fl.fit(step, state, loaders or BATCHES, **{"hooks": (), **settings})


def losses(state, key="recent/loss"):
    return [(r.step, r.metrics[key]) for r in state.history.having(key)]


def endless():
    while True:
        yield from BATCHES


PAIR = {"train": BATCHES, "valid": BATCHES[:1]}


@pytest.mark.parametrize(("members", "settings", "found"), [
    # the mean over the items since the last record: (1 + 8) / 3, (10 + 8) / 3
    ((), {"record_every": every(steps=2)}, [(2, 3.0), (4, 6.0), (5, 7.0)]),
    ((), {"record_every": every(steps=2), "steps": 3}, [(2, 3.0), (3, 10.0)]),
    # an evaluation begins a new interval
    ((), {"record_every": every(steps=4), "evaluate_every": every(steps=3), "loaders": PAIR},
        [(3, 19 / 4), (4, 4.0), (5, 7.0)]),
    # an interval of skipped updates has no record
    ((fl.skip_nonfinite(5),),
        {"record_every": ALWAYS, "loaders": [NAN, BATCHES[0], NAN, NAN, BATCHES[2], NAN]},
        [(1, 1.0), (2, 10.0)]),
    # ... and the step that stays a multiple of 2 makes no second one
    ((fl.skip_nonfinite(5),),
        {"record_every": every(steps=2), "loaders": [*BATCHES[:2], NAN, NAN, *BATCHES[2:]]},
        [(2, 3.0), (4, 6.0), (5, 7.0)]),
    ((), {"record_every": every(steps=3), "steps": 7, "loaders": endless},
        [(3, 19 / 4), (6, (8 + 7 + 1) / 4), (7, 4.0)]),
    ((), {"record_every": when(lambda state: state.step == 1) | at_end()},
        [(1, 1.0), (5, (8 + 10 + 8 + 7) / 6)]),
])  # fmt: skip
def test_a_record_has_the_mean_over_the_items_since_the_last_one(members, settings, found):
    state = train(*members, **settings)
    assert losses(state) == found
    assert all(r.metrics for r in state.history)


def test_an_interval_that_is_due_at_the_end_alone_is_that_of_the_closing_record():
    moment = every(steps=3) | at_end()
    part = train(record_every=moment, steps=4)
    assert [(r.step, r.closing) for r in part.history] == [(3, False), (4, True)]
    again, whole = train(record_every=moment, state=part), train(record_every=moment)
    assert [(r.step, r.metrics) for r in again.history if not r.closing] == [
        (r.step, r.metrics) for r in whole.history
    ]


def test_a_record_between_evaluations_has_nothing_else_but_the_learning_rate():
    with_it, without = train(record_every=every(steps=2), loaders=PAIR), train(loaders=PAIR)
    recent, rest = ["recent/loss", "recent/lr"], ["train/loss", "train/lr", "valid/loss"]
    assert [sorted(r.metrics) for r in with_it.history] == [recent, recent, [*recent, *rest]]
    for name in rest:
        assert with_it.history[name] == without.history[name]
    part = train(record_every=every(steps=3), steps=2)
    assert "recent/loss" in part.metrics
    state = train(state=part, steps=4)  # a run without it forgets the interval
    assert "recent/loss" not in state.metrics and "recent/loss" not in state.history[-1].metrics


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_the_learning_rate_of_each_group_is_in_every_record(rate):
    model = torch.nn.Linear(1, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    state = fl.TrainState.create(model, torch.optim.SGD(groups, lr=rate), seed=0)
    loss_fn = lambda model, batch: model(batch[:, None]).mean()
    state = fl.fit(fl.pipeline()(loss_fn), state, BATCHES, hooks=(), record_every=every(steps=4))
    for name, value in (("lr", 0.25), ("lr/1", 0.5)):
        assert state.history[f"recent/{name}"] == (value,) * 2 == 2 * state.history[f"train/{name}"]


@pytest.mark.parametrize("member", [
    fl.schedule(lambda step, total: 0.5**step),
    fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
], ids=repr)  # fmt: skip
def test_under_a_schedule_it_is_the_rate_of_the_last_update(member):
    state = train(member, state=toy(w=1.0, lr=1.0), record_every=every(steps=2))
    assert state.history["recent/lr"] == (0.5, 0.125, 0.0625)
    assert state.history["train/lr"] == (0.0625,)


def test_hooks_can_follow_it():
    stop = fl.early_stop("recent/loss", patience=1)
    state = train(record_every=every(steps=1), hooks=(stop,))
    assert (state.step, state.stop is not None) == (2, True)  # 1, then 4
    with pytest.raises(KeyError, match=r"record_every=every\(steps=...\)"):
        train(hooks=(stop,))


def test_each_record_is_one_read(monkeypatch):
    reads, read = [], Metrics.read
    monkeypatch.setattr(Metrics, "read", lambda *args: reads.append(1) or read(*args))
    train(record_every=every(steps=2))
    assert len(reads) == 3


# --- what is asked, and when


class Asked:
    """A trigger of the user, which only has ``due``."""

    def __init__(self):
        self.steps = []

    def due(self, state):
        self.steps.append(state.step)
        return False


def test_a_run_that_went_back_makes_the_record_that_it_had_passed(back_once):
    """It goes back from step 3 to step 1, so step 2 is reached twice."""
    records = []
    note = lambda s: records.append(s.history[-1].step if len(s.history) else 0) or s
    given = {"hooks": (back_once, note), "record_every": every(steps=2)}
    state = train(loaders=[torch.ones(1)] * 6, **given)
    assert [step for step, _ in losses(state)] == [2, 4, 6]
    assert records == [0, 2, 0, 2, 2, 4, 4, 6]  # the third call is that of step 3, back at step 1


def test_a_trigger_without_a_next_step_is_asked_after_every_update():
    for asked, moment in ((one := Asked(), one), (two := Asked(), every(steps=3) | two)):
        train(loaders=BATCHES[:4], record_every=moment, evaluate_every=every(epochs=1))
        assert [step for step in asked.steps if step != 3] == [1, 2, 4]

    class Odd(fl.every):
        def due(self, state):
            return state.step % 2 == 1

    state = train(record_every=Odd(steps=100))
    assert [step for step, _ in losses(state)] == [1, 3, 5]


def test_the_time_continues_from_the_history_of_a_state_that_a_hook_went_to():
    old = train(loaders=BATCHES[:1])
    record = attrs.evolve(old.history[-1], seconds=1000.0)
    long_ago = fl.snapshot(attrs.evolve(old, history=fl.History([record])))
    went = []
    there = lambda state: attrs.evolve(long_ago, run_id=state.run_id)
    go_there = lambda state: went.append(1) or (there(state) if len(went) == 1 else state)
    state = train(loaders=BATCHES[:1], epochs=3, hooks=(go_there,))
    assert [r.seconds >= 1000.0 for r in state.history] == [True] * 3
