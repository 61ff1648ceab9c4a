"""Records between evaluations: ``fit(..., record_every=...)``.

With ``w = 1`` and a learning rate of 0, the loss of a batch is its mean.
"""

import attrs
import pytest
import torch
from toolz import partition_all

import fnloop as fl
from fnloop import at_end, every, when
from fnloop.testing import toy, toy_loss

BATCHES = [torch.tensor(x) for x in ([1.0], [4.0, 4.0], [10.0], [2.0, 6.0], [7.0])]


def train(*middleware, state=None, loaders=None, **settings):
    step = fl.pipeline(*middleware)(toy_loss)
    state = state or toy(w=1.0, lr=0.0)
    return fl.fit(step, state, loaders or BATCHES, **{"hooks": (), **settings})


def losses(state, key="recent/loss"):
    return [(r.step, r.metrics[key]) for r in state.history.having(key)]


def test_a_record_has_the_mean_over_the_items_since_the_last_one():
    state = train(record_every=every(steps=2))
    assert losses(state) == [(2, 3.0), (4, 6.0), (5, 7.0)]  # (1 + 8) / 3, (10 + 8) / 3
    assert losses(state, "train/loss") == [(5, (1 + 8 + 10 + 8 + 7) / 7)]


def test_a_record_between_evaluations_has_nothing_else_but_the_learning_rate():
    state = train(record_every=every(steps=2), loaders=(BATCHES, BATCHES[:1]))
    assert [sorted(r.metrics) for r in state.history] == [
        ["recent/loss", "recent/lr"],
        ["recent/loss", "recent/lr"],
        ["recent/loss", "recent/lr", "train/loss", "train/lr", "valid/loss"],
    ]


def test_an_interval_of_skipped_updates_has_no_record():
    nan = torch.tensor([float("nan")])
    batches = [nan, BATCHES[0], nan, nan, BATCHES[2], nan]
    skipping = fl.skip_nonfinite(5)
    state = train(skipping, record_every=when(lambda state: True), loaders=batches)
    assert losses(state) == [(1, 1.0), (2, 10.0)]
    assert [r.step for r in state.history] == [1, 2, 2]  # the last one is that of the epoch
    assert all(r.metrics for r in state.history)


def test_an_interval_that_is_due_at_the_end_alone_is_that_of_the_closing_record():
    moment = every(steps=3) | at_end()
    part = train(record_every=moment, steps=4)
    assert [(r.step, r.closing) for r in part.history] == [(3, False), (4, True)]
    again, whole = train(record_every=moment, state=part), train(record_every=moment)
    assert [(r.step, r.metrics) for r in again.history if not r.closing] == [
        (r.step, r.metrics) for r in whole.history
    ]


def test_an_evaluation_begins_a_new_interval():
    loaders = {"train": BATCHES, "valid": BATCHES[:1]}
    state = train(record_every=every(steps=4), evaluate_every=every(steps=3), loaders=loaders)
    assert losses(state) == [(3, 19 / 4), (4, 4.0), (5, 7.0)]


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 2])
def test_it_equals_a_loop_by_hand(window, steps):
    top = fl.metric(top=lambda aux, batch: fl.Max(batch.max()))
    state = train(top, fl.accumulate(window), epochs=2, record_every=every(steps=steps))
    expected, step = [], 0
    for _ in range(2):
        interval = []
        for group in partition_all(window, BATCHES):
            interval, step = [*interval, *group], step + 1
            if step % steps == 0 or group[-1] is BATCHES[-1]:
                items = torch.cat(interval).tolist()
                expected.append((step, sum(items) / len(items), max(items)))
                interval = []
    found = [(r.step, r.metrics["recent/loss"], r.metrics["recent/top"]) for r in state.history]
    assert found == expected


@fl.middleware("gradient")
def skip_negative():
    def wrap(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="negative" if batch[0] < 0 else None)

        return skipping

    return wrap


def test_a_skipped_update_does_not_count():
    data = [BATCHES[0], -BATCHES[2], *BATCHES[1:]]
    assert losses(train(skip_negative(), loaders=data, record_every=every(steps=2)))[0] == (2, 3.0)


def test_the_train_metrics_are_those_without_it():
    with_it, without = train(epochs=2, record_every=every(steps=1)), train(epochs=2)
    assert with_it.history["train/loss"] == without.history["train/loss"]


@pytest.mark.parametrize("stop", range(1, 10))
def test_a_resume_within_an_interval_makes_the_same_records(stop, tmp_path):
    settings = {"epochs": 2, "record_every": every(steps=3)}
    whole = train(**settings)
    part = train(**{**settings, "steps": stop})
    resumed = train(state=fl.restore(fl.save(part, tmp_path / "a"), toy()), **settings)
    records = [record for record in resumed.history if not record.closing]
    assert fl.History(records) == whole.history


def test_a_closing_record_has_the_unfinished_interval():
    state = train(record_every=every(steps=2), steps=3)
    assert [(r.step, r.closing) for r in state.history] == [(2, False), (3, True)]
    assert losses(state) == [(2, 3.0), (3, 10.0)]


def test_a_run_without_it_forgets_the_interval():
    state = train(record_every=every(steps=3), steps=2)
    assert "recent/loss" in state.metrics
    state = train(state=state, steps=4)
    assert "recent/loss" not in state.metrics and "recent/loss" not in state.history[-1].metrics


def test_a_stream_without_end():
    def stream():
        while True:
            yield from BATCHES

    state = train(loaders=stream, steps=7, record_every=every(steps=3))
    assert losses(state) == [(3, 19 / 4), (6, (8 + 7 + 1) / 4), (7, 4.0)]


@pytest.mark.parametrize("rate", [0.25, torch.tensor(0.25)], ids=["number", "tensor"])
def test_the_learning_rate_of_each_group_is_in_every_record(rate):
    model = torch.nn.Linear(1, 1)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    state = fl.TrainState.create(model, torch.optim.SGD(groups, lr=rate), seed=0)
    loss_fn = lambda model, batch: model(batch[:, None]).mean()
    state = fl.fit(fl.pipeline()(loss_fn), state, BATCHES, hooks=(), record_every=every(steps=4))
    assert state.history["recent/lr"] == (0.25, 0.25) == 2 * state.history["train/lr"]
    assert state.history["recent/lr/1"] == (0.5, 0.5) == 2 * state.history["train/lr/1"]


def test_under_a_schedule_it_is_the_rate_of_the_last_update():
    halves = fl.schedule(lambda step, total: 0.5**step)
    state = train(halves, state=toy(w=1.0, lr=1.0), record_every=every(steps=2))
    assert state.history["recent/lr"] == (0.5, 0.125, 0.0625)
    assert state.history["train/lr"] == (0.0625,)


def test_a_torch_scheduler_too():
    halves = fl.torch_scheduler(lambda o, run: torch.optim.lr_scheduler.ExponentialLR(o, 0.5))
    state = train(halves, state=toy(w=1.0, lr=1.0), record_every=every(steps=2))
    assert state.history["recent/lr"] == (0.5, 0.125, 0.0625)


def test_hooks_can_follow_it():
    stop = fl.early_stop("recent/loss", patience=1)
    state = train(record_every=every(steps=1), hooks=(stop,))
    assert (state.step, state.stop is not None) == (2, True)  # 1, then 4
    with pytest.raises(KeyError, match=r"record_every=every\(steps=...\)"):
        train(hooks=(stop,))


def test_any_moment_will_do():
    moment = when(lambda state: state.step == 1) | at_end()
    assert losses(train(record_every=moment)) == [(1, 1.0), (5, (8 + 10 + 8 + 7) / 6)]


@pytest.mark.parametrize("wrong", [50, "epoch", every, lambda state: True])
def test_it_must_be_a_moment(wrong):
    with pytest.raises(TypeError, match=r"expects record_every as every\(epochs=1\)"):
        train(record_every=wrong)


def test_an_error_in_a_moment_names_it():
    def broken(state):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        train(record_every=when(broken))
    assert "while in when(broken)" in caught.value.__notes__[0]
    assert caught.value.state.step == 1


def test_each_record_is_one_read(monkeypatch):
    from fnloop._loop import run

    reads = []
    read = run.read
    monkeypatch.setattr(run, "read", lambda *args: reads.append(1) or read(*args))
    train(record_every=every(steps=2))
    assert len(reads) == 3


def test_a_state_between_two_records_is_plain_data_of_a_checkpoint(tmp_path):
    state = train(record_every=every(steps=3), steps=2)
    back = fl.restore(fl.save(state, tmp_path / "a"), toy())
    assert back.metrics["recent/loss"].compute() == 3.0
    assert attrs.evolve(back, metrics={}).metrics == {}


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

    def note(state):
        records.append(state.history[-1].step if len(state.history) else 0)
        return state

    state = fl.fit(
        fl.pipeline()(toy_loss),
        toy(),
        [torch.ones(1)] * 6,
        hooks=(back_once, note),
        record_every=fl.every(steps=2),
    )
    assert [r.step for r in state.history if "recent/loss" in r.metrics] == [2, 4, 6]
    assert records == [0, 2, 0, 2, 2, 4, 4, 6]  # the third call is that of step 3, back at step 1


def test_a_guard_that_goes_back_makes_the_records_again_and_so_does_a_resumed_run():
    """A spike in the sixth batch takes the run from step 5 back to step 3."""
    batches = [torch.tensor([x]) for x in (1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1.0, 1.0, 1.0)]
    step = fl.pipeline(fl.spike_guard(3, 10.0, then="back"))(toy_loss)

    def steps_of_records(*hooks, state=None):
        state = fl.fit(
            step,
            state or toy(w=1.0, lr=1e-3),
            batches,
            epochs=1,
            hooks=hooks,
            record_every=fl.every(steps=5),
        )
        return state, [
            r.step for r in state.history if "recent/loss" in r.metrics and not r.closing
        ]

    whole, steps = steps_of_records()
    assert steps.count(5) == 2
    pause = fl.when(lambda state: state.batch == 6)(lambda state: attrs.evolve(state, stop="now"))
    paused, _ = steps_of_records(pause)
    resumed, again = steps_of_records(state=attrs.evolve(paused, stop=None))
    assert (again, resumed.step) == (steps, whole.step)


def test_a_trigger_without_a_next_step_is_asked_after_every_update():
    for asked, moment in ((one := Asked(), one), (two := Asked(), fl.every(steps=3) | two)):
        fl.fit(
            fl.pipeline()(toy_loss),
            toy(),
            [torch.ones(1)] * 4,
            hooks=(),
            record_every=moment,
            evaluate_every=fl.every(epochs=1),
        )
        assert [step for step in asked.steps if step != 3] == [1, 2, 4]


def test_a_subclass_of_every_with_moments_of_its_own_is_asked_after_every_update():
    class Odd(fl.every):
        def due(self, state):
            return state.step % 2 == 1

    state = train(record_every=Odd(steps=100))
    assert [step for step, _ in losses(state)] == [1, 3, 5]


def test_a_skipped_update_after_a_record_makes_none():
    """The step stays a multiple of 2."""
    nan = torch.tensor([float("nan")])
    one = torch.ones(1)
    state = fl.fit(
        fl.pipeline(fl.skip_nonfinite())(toy_loss),
        toy(lr=0.1),
        [one, one, nan, nan, one, one, one],
        hooks=(),
        record_every=fl.every(steps=2),
    )
    assert [r.step for r in state.history if "recent/loss" in r.metrics] == [2, 4, 5]


def test_the_time_continues_from_the_history_of_a_state_that_a_hook_went_to():
    old = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], hooks=())
    record = attrs.evolve(old.history[-1], seconds=1000.0)
    long_ago = fl.snapshot(attrs.evolve(old, history=fl.History([record])))
    went = []

    def go_there(state):
        went.append(state.step)
        return long_ago if len(went) == 1 else state

    state = fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], epochs=3, hooks=(go_there,))
    assert [r.seconds >= 1000.0 for r in state.history] == [True] * 3
