"""timings and throughput, by a clock that only the test moves: numbers for the head."""

import contextlib
import importlib
import math
import pickle
import time

import pytest
import torch
from after_steps import after, skipping
from fake_terminal import fake_clock
from sample_middleware import output_mean
from toy_runs import noting

import fnloop as fl
from fnloop._extensions.middleware import times
from fnloop._extensions.middleware.times import Elapsed, _elapsed
from fnloop.testing import (
    law_fold,
    law_neutral,
    law_no_host_reads,
    law_purity,
    law_skipped_updates,
    small,
    toy,
    toy_loss,
)

DATA, STEP, EVALUATION, PAUSE = 2.0, 3.0, 50.0, 7.0


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless ``clock.now`` is changed."""
    with contextlib.suppress(ModuleNotFoundError):  # the kernel does without it
        importlib.import_module("fnloop._extensions.hooks.progress")  # whose clock is replaced too
    made = fake_clock(monkeypatch)
    monkeypatch.setattr(time, "perf_counter", made.perf_counter)
    return made


class Data:
    """Batches that each take a time to load."""

    def __init__(self, clock, batches, seconds=DATA):
        self.clock, self.batches, self.seconds = clock, batches, seconds

    def __iter__(self):
        for batch in self.batches:
            self.clock.now += self.seconds
            yield batch

    def __len__(self):
        return len(self.batches)


def slow(clock):
    return clock.timed(toy_loss, STEP, EVALUATION)


BATCHES, ONES = [torch.ones(n) for n in (4, 4, 2)], [torch.ones(1)] * 2


def fitted(clock, *members, state=None, batches=BATCHES, step=None, **settings):
    make = fl.pipeline(*members)(slow(clock) if step is None else step)
    loaders = {"train": Data(clock, batches), "valid": ONES}
    settings = {"hooks": (clock.takes(PAUSE),), **settings}
    return fl.fit(make, toy() if state is None else state, loaders, **settings)


# --- timings


def latest(state, *names):
    """Return the newest values in training."""
    return tuple(state.history.latest(f"train/{name}") for name in names)


TIMES = "time/data", "time/step"


@pytest.mark.parametrize(("members", "data", "step"), [
    ((), DATA, STEP),
    ((fl.accumulate(2),), (2 * DATA + DATA) / 2, (2 * STEP + STEP) / 2),  # waits for all
])  # fmt: skip
def test_times_of_data_update_and_evaluation(members, data, step, clock):
    history = fitted(clock, *members, fl.timings(), epochs=2).history
    assert history["train/time/data"] == (data, data)
    assert history["train/time/step"] == (step, step)
    assert history["valid/time/evaluate"] == (2 * EVALUATION,) * 2


def test_a_fetch_counts_once_for_the_updates_that_tbptt_makes_of_it(clock):
    """Two batches of three windows."""

    def loss_fn(model, batch, carry):
        clock.now += STEP
        return toy_loss(model, batch)[0], {}, torch.zeros(1)

    members, never = (fl.tbptt(2), fl.timings(), fl.throughput()), fl.every(epochs=2)
    batches = [torch.ones(4, 6)] * 2
    state = fitted(clock, *members, batches=batches, step=loss_fn, evaluate_every=never)
    record, seconds = state.history[0].metrics, 2 * DATA + 6 * STEP
    assert record["train/time/data"] == 2 * DATA / 6
    assert record["train/time/step"] == STEP
    assert record["train/throughput/samples"] == 6 * 4 / seconds


@pytest.mark.parametrize(("batch", "fetched"), [("same", DATA), ("next", 2 * DATA)])
def test_a_fetch_counts_once_for_the_turns_of_a_round(batch, fetched, clock):
    model = torch.nn.ModuleDict({"a": toy().model, "b": toy().model})
    optimizers = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in model}

    def step_of(name):
        def loss_fn(model, batch):
            clock.now += STEP
            return toy_loss(model[name], batch)

        return fl.pipeline(fl.timings())(loss_fn)

    turns = fl.alternate({name: step_of(name) for name in optimizers}, batch=batch)
    state, batches = fl.TrainState.create(model, optimizers), [torch.ones(4)] * 4
    settings = {"batches": batches, "step": turns, "evaluate_every": fl.every(epochs=2)}
    state = fitted(clock, fl.timings(), state=state, hooks=(), **settings)  # around the round
    assert latest(state, "a/time/data", "b/time/data", "time/data") == (fetched, 0.0, fetched)
    assert latest(state, "a/time/step", "b/time/step", "time/step") == (STEP, STEP, 2 * STEP)


def test_an_evaluation_is_in_the_record_that_it_made(clock):
    every = {"evaluate_every": fl.every(epochs=2), "record_every": fl.every(steps=2)}
    history = fitted(clock, fl.timings(), epochs=2, **every).history
    found = [(r.step, r.metrics.get("valid/time/evaluate")) for r in history]
    assert found == [(2, None), (3, None), (4, None), (6, 2 * EVALUATION)]
    assert history["recent/time/step"] == (STEP,) * 4
    assert history["recent/time/data"] == (DATA,) * 4


def test_the_time_since_the_last_record(clock):
    """Update i takes i seconds."""
    takes = iter((1.0, 2.0, 3.0, 4.0))

    def loss_fn(model, batch):
        clock.now += next(takes) if model.training else EVALUATION
        return toy_loss(model, batch)

    settings = {"batches": [torch.ones(1)] * 4, "record_every": fl.every(steps=2)}
    state = fitted(clock, fl.timings(), step=loss_fn, **settings)
    assert state.history["recent/time/step"] == (1.5, 3.5)
    assert state.history["train/time/step"] == (2.5,)


def test_a_bare_step_knows_its_own_time_only(clock):
    step = fl.pipeline(fl.timings(), fl.throughput())(slow(clock))
    _, out = step(toy(), torch.ones(6))
    found = {name: metric.compute() for name, metric in out.metrics.items()}
    assert found == {"time/step": STEP, "throughput/samples": 6 / STEP}
    assert fl.evaluate(step, toy(), [torch.ones(1)]) == {"loss": 0.0}


def of_two(batch, out):
    return len(batch) == 2  # as the last one is


def test_skipped_updates_do_not_count(clock):
    state = fitted(clock, skipping(of_two), fl.timings(), fl.throughput())
    found = latest(state, "time/step", "throughput/samples")
    assert state.skipped == 1 and found == (STEP, 8 / (2 * (DATA + STEP)))


# --- throughput

WITHOUT = lambda state, batch, out: fl.Output(out.loss, 0, out.aux) if len(batch) == 2 else out
NONE_LEFT = after("gradient", WITHOUT)


@pytest.mark.parametrize(("members", "samples"), [
    *(((fl.accumulate(n), fl.throughput()), 10) for n in (1, 2, 3)),
    # An update without a batch of its own, as on a process that has none in the last window.
    ((NONE_LEFT, fl.throughput()), 4 + 4),
], ids=repr)  # fmt: skip
def test_samples_in_a_second_of_training(members, samples, clock):
    """In 3 × (2 + 3) seconds; neither evaluations nor hooks count."""
    state = fitted(clock, *members, evaluate_every=fl.every(epochs=1))
    assert latest(state, "throughput/samples") == pytest.approx((samples / 15,))


def test_the_rate_since_the_last_record_and_the_utilization_of_a_device(clock):
    member, settings = fl.throughput(flops=30.0, peak=40.0), {"evaluate_every": fl.every(steps=1)}
    history, rates = fitted(clock, member, epochs=3, **settings).history, [4 / 5, 8 / 10, 10 / 15]
    assert history["train/throughput/samples"] == pytest.approx(rates * 3)
    assert history["train/throughput/mfu"] == pytest.approx([x * 30 / 40 for x in rates] * 3)


def squared(model, batch):
    return model(batch).square().mean()


@pytest.mark.parametrize("members", [(), (fl.accumulate(2),), (fl.clip(1.0),)])
def test_operations_are_counted_in_the_first_update(members, clock):
    """Of 8 × 4 weights: 2 × 32 forward, and as many for their gradients, of each sample."""
    model = torch.nn.Linear(8, 4)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
    member = fl.throughput(flops="count", peak=256.0)
    step = fl.pipeline(*members, member)(squared)
    state = fl.fit(step, state, Data(clock, [torch.ones(5, 8), torch.ones(3, 8)] * 2), hooks=())
    assert state.slots["throughput/samples"] == 128
    mfu, rate = latest(state, "throughput/mfu", "throughput/samples")
    assert mfu == rate / 2


def test_nothing_to_count_is_told(clock, caplog):
    state = fitted(clock, fl.throughput(flops="count", peak=1.0))
    assert math.isnan(latest(state, "throughput/mfu")[0])
    assert caplog.messages == [
        'throughput(flops="count"): torch counts matrix products, convolutions and attention, and '
        "the first update had none of them. Give the operations of one sample: flops=..."
    ]


def test_weight_in_a_second_of_training_is_added_up_exactly(clock):
    def by_tokens(model, batch):
        loss, _ = slow(clock)(model, batch)
        return loss, {"weight": torch.tensor(2.0**24 if len(batch) == 2 else 1.0)}

    state = fitted(clock, fl.throughput("weight"), step=by_tokens)
    assert latest(state, "throughput/weight") == ((2**24 + 2) / 15,)


def test_batches_without_a_number_of_samples_need_weights(clock):
    batch = (torch.ones(2), torch.ones(3))
    loss_fn = lambda model, batch: (model.w * 1.0, {"weight": 5})
    with pytest.raises(ValueError, match=r'write throughput\(of="weight"\), which counts aux'):
        fl.pipeline(fl.throughput())(loss_fn)(toy(), batch)
    _, out = fl.pipeline(fl.throughput("weight"))(loss_fn)(toy(), batch)
    assert out.metrics["throughput/weight"].amount == 5


# --- in any place of a pipeline, saved, and by the laws


MEMBERS = (fl.timings(), fl.throughput(flops=1.0, peak=2.0), fl.grad_norm(), fl.device_memory())


@pytest.fixture
def steady_memory(monkeypatch):
    """A device whose peak does not change; a gauge of another test is not used."""
    monkeypatch.setattr(times, "_peak_gib", lambda device: 1.0)
    times._gauge.cache_clear()
    yield
    times._gauge.cache_clear()


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
@pytest.mark.parametrize("others", [(), (fl.accumulate(2), fl.metric(mean=output_mean))], ids=repr)
def test_each_keeps_the_laws(clock, steady_memory, member, others):
    pipe = fl.pipeline(*others, member)
    law_fold(pipe, small())
    law_purity(pipe, small())
    law_no_host_reads(pipe, small())
    law_skipped_updates(pipe, small())
    law_neutral(member, fl.pipeline(*others), small())


# --- on a GPU


class FakeEvent:
    """An event of a device whose time is that of the clock; it has passed when waited for."""

    def __init__(self, clock, log):
        self.at, self.log, self.done = clock.now, log, False

    def query(self):
        return self.done

    def synchronize(self):
        self.log.append("wait")
        self.done = True

    def elapsed_time(self, end):
        assert end.done
        return 1000 * (end.at - self.at)

    def __deepcopy__(self, memo):
        raise AssertionError("an event cannot be copied")

    __reduce_ex__ = __deepcopy__


@pytest.fixture
def events(clock, monkeypatch):
    """Marks are events; the list gets an entry for each wait."""
    log = []
    monkeypatch.setattr(times, "mark", lambda device: FakeEvent(clock, log))
    return log


def test_events_are_read_at_the_report_only(clock, events):
    note, waited = noting(lambda state: len(events))
    state = fitted(clock, fl.timings(), fl.throughput(), hooks=(note,))
    assert waited[:2] == [0, 0] and waited[2] > 0
    assert latest(state, *TIMES) == (DATA, STEP)


def test_the_time_of_a_device_runs_on_between_updates(clock, events):
    """An update counts from the end of the one before, hooks included, evaluations excluded."""
    state = fitted(clock, fl.throughput(), epochs=2)
    seconds = (DATA + STEP) + (PAUSE + DATA + STEP) * 2
    assert state.history["train/throughput/samples"] == pytest.approx([10 / seconds] * 2)
    state = fitted(clock, fl.throughput(), evaluate_every=fl.every(steps=1))
    assert state.history["train/throughput/samples"] == pytest.approx([4 / 5, 8 / 10, 10 / 15])


def test_events_that_have_passed_are_not_kept(clock, events):
    total = Elapsed(0)
    for _ in range(1000):
        start, clock.now = FakeEvent(clock, events), clock.now + 1.0
        end = FakeEvent(clock, events)
        end.done = True
        total = total.combine(_elapsed(1, start, end))
        assert len(total.pending) <= times.SETTLE
    assert total.compute() == 1.0
    begun, ended, later = (FakeEvent(clock, events) for _ in range(3))
    ended.at, later.at, ended.done = begun.at + 2.0, begun.at + 5.0, True
    events.clear()  # those that have not passed are kept without waiting
    found = Elapsed(2, pending=((begun, ended), (ended, later))).settled(wait=False)
    assert (found.seconds, found.pending, events) == (2.0, ((ended, later),), [])
    assert found.compute() == (2.0 + 3.0) / 2


def test_events_are_neither_saved_nor_copied(tmp_path, clock, events):
    state = fitted(clock, fl.timings(), fl.throughput(), steps=2, epochs=1, hooks=())
    assert state.metrics["time/step"].pending
    copied = fl.snapshot(state)
    assert copied.metrics["time/step"].pending == ()
    assert copied.metrics["time/step"].compute() == STEP
    restored = fl.restore(fl.save(state, tmp_path / "a"), toy())
    new = fitted(clock, fl.timings(), fl.throughput(), state=restored, hooks=())
    assert new.history.latest("train/time/step") == STEP
    sent = pickle.loads(pickle.dumps(state.metrics["throughput/samples"].to_cpu()))
    assert sent.compute() == pytest.approx(8 / 10)


@pytest.mark.parametrize("order", [1, -1])
def test_times_are_measured_outside_of_a_graph(recorders, clock, order):
    members = [fl.cuda_graph(warmup=1), fl.timings(), fl.throughput("weight"), fl.device_memory()]
    state = fitted(clock, *members[::order], batches=[torch.ones(4)] * 5)
    names = "time/step", "time/data", "throughput/weight", "memory/peak_gib"
    step, data, rate, peak = latest(state, *names)
    assert recorders and data == DATA and peak > 0
    assert step <= STEP and rate >= 4 / (DATA + STEP)


# --- the stopwatch of a run


@pytest.mark.parametrize("on_a_device", [False, True])
def test_what_a_caller_does_between_two_epochs_does_not_count(on_a_device, clock, request):
    """Nor do hooks count for the stopwatch of a run, and for a rate on the host."""
    if on_a_device:
        request.getfixturevalue("events")
    step, loaders = fl.pipeline(fl.throughput())(slow(clock)), (Data(clock, BATCHES), ONES)
    note, watches = noting(lambda state: state.run.live.stopwatch)
    hooks = (note,) if on_a_device else (note, clock.takes(PAUSE))
    for state in fl.run(step, toy(), loaders, epochs=2, hooks=hooks):
        assert watches[-1].trained == state.epoch * 3 * (DATA + STEP)
        assert watches[-1].evaluated == 2 * EVALUATION
        clock.now += 1000.0
    assert state.history["train/throughput/samples"] == pytest.approx([10 / 15] * 2)


@pytest.mark.parametrize("name", ["time/step", "time/data", "time/evaluate"])
def test_another_metric_of_the_name_of_a_time_is_refused(name, clock):
    members = fl.timings(), fl.metric(**{name: lambda aux, batch: 1.0})
    with pytest.raises(ValueError, match=f"timings reports the metric '{name}', which another"):
        fitted(clock, *members)
