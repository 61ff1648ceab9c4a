"""timings and throughput, by a clock that only the test moves: numbers for the head."""

import time

import attrs
import pytest
import torch
from sample_middleware import output_mean

import fnloop as fl
from fnloop._core import metrics
from fnloop._core.metrics import Elapsed
from fnloop.testing import (
    assert_same,
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

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


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


def slow(clock, step=STEP, evaluation=EVALUATION):
    def loss_fn(model, batch):
        clock.now += step if model.training else evaluation
        return toy_loss(model, batch)

    return loss_fn


def pause(clock):
    def hook(state):
        clock.now += PAUSE
        return state

    return hook


BATCHES = [torch.ones(n) for n in (4, 4, 2)]


def fitted(clock, *members, state=None, batches=BATCHES, step=None, **settings):
    make = fl.pipeline(*members)(slow(clock) if step is None else step)
    loaders = {"train": Data(clock, batches), "valid": [torch.ones(1)] * 2}
    settings = {"hooks": (pause(clock),), **settings}
    return fl.fit(make, toy() if state is None else state, loaders, **settings)


# --- timings


def test_times_of_data_update_and_evaluation(clock):
    state = fitted(clock, fl.timings(), epochs=2)
    for record in state.history:
        assert record.metrics["train/time/data"] == DATA
        assert record.metrics["train/time/step"] == STEP
        assert record.metrics["valid/time/evaluate"] == 2 * EVALUATION


def test_a_window_waits_for_all_of_its_batches(clock):
    state = fitted(clock, fl.accumulate(2), fl.timings())
    assert state.history.latest("train/time/data") == (2 * DATA + DATA) / 2
    assert state.history.latest("train/time/step") == (2 * STEP + STEP) / 2


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


@pytest.mark.parametrize("batch", ["same", "next"])
def test_a_fetch_counts_once_for_the_turns_of_a_round(batch, clock):
    model = torch.nn.ModuleDict({"a": toy().model, "b": toy().model})
    optimizers = {k: torch.optim.SGD(model[k].parameters(), lr=1.0) for k in model}

    def step_of(name):
        def loss_fn(model, batch):
            clock.now += STEP
            return toy_loss(model[name], batch)

        return fl.pipeline(fl.timings())(loss_fn)

    turns = fl.alternate({name: step_of(name) for name in optimizers}, batch=batch)
    step = fl.pipeline(fl.timings())(turns)  # around the round
    state = fl.TrainState.create(model, optimizers)
    state = fitted(
        clock,
        state=state,
        batches=[torch.ones(4)] * 4,
        step=step,
        hooks=(),
        evaluate_every=fl.every(epochs=2),
    )
    record, fetched = state.history[0].metrics, DATA if batch == "same" else 2 * DATA
    assert (record["train/a/time/data"], record["train/b/time/data"]) == (fetched, 0.0)
    assert record["train/a/time/step"] == record["train/b/time/step"] == STEP
    assert (record["train/time/data"], record["train/time/step"]) == (fetched, 2 * STEP)


def test_an_evaluation_is_in_the_record_that_it_made(clock):
    state = fitted(
        clock, fl.timings(), epochs=2, evaluate_every=fl.every(epochs=2),
        record_every=fl.every(steps=2),
    )  # fmt: skip
    found = [(r.step, r.metrics.get("valid/time/evaluate")) for r in state.history]
    assert found == [(2, None), (3, None), (4, None), (6, 2 * EVALUATION)]
    assert state.history["recent/time/step"] == (STEP,) * 4
    assert state.history["recent/time/data"] == (DATA,) * 4


def test_the_time_since_the_last_record(clock):
    """Update i takes i seconds."""
    takes = iter((1.0, 2.0, 3.0, 4.0))

    def loss_fn(model, batch):
        clock.now += next(takes)
        return toy_loss(model, batch)

    state = fl.fit(
        fl.pipeline(fl.timings())(loss_fn), toy(), [torch.ones(1)] * 4, hooks=(),
        record_every=fl.every(steps=2),
    )  # fmt: skip
    assert state.history["recent/time/step"] == (1.5, 3.5)
    assert state.history["train/time/step"] == (2.5,)


def test_a_bare_step_knows_its_own_time_only(clock):
    step = fl.pipeline(fl.timings())(slow(clock))
    _, out = step(toy(), torch.ones(1))
    assert {name: m.compute() for name, m in out.metrics.items()} == {"time/step": STEP}
    assert fl.evaluate(step, toy(), [torch.ones(1)]) == {"loss": 0.0}


def test_without_timings_nothing_is_there(clock):
    names = fitted(clock, epochs=1).history.keys()
    assert not [name for name in names if "time" in name or "throughput" in name]


def skip_second(step):
    def skipping(state, batch):
        state, out = step(state, batch)
        return state, attrs.evolve(out, skip="no") if len(batch) == 2 else out

    return skipping


def test_skipped_updates_do_not_count(clock):
    skipping = fl.Middleware("skipping", gradient=skip_second)
    state = fitted(clock, skipping, fl.timings(), fl.throughput())
    assert state.skipped == 1
    assert state.history.latest("train/time/step") == STEP
    assert state.history.latest("train/throughput/samples") == 8 / (2 * (DATA + STEP))


# --- throughput


def test_the_time_of_an_update_without_a_batch_of_its_own_counts(clock):
    """As on a process that has none in the last window of an epoch."""

    def lose_second(step):
        def losing(state, batch):
            state, out = step(state, batch)
            return state, fl.Output(out.loss, 0, out.aux) if state.batch == 1 else out

        return losing

    state = fitted(clock, fl.Middleware("lose", gradient=lose_second), fl.throughput())
    assert state.history.latest("train/throughput/samples") == pytest.approx((4 + 2) / 15)


def test_samples_in_a_second_of_training(clock):
    """10 samples in 3 x (2 + 3) seconds; neither evaluations nor hooks count."""
    state = fitted(clock, fl.throughput(), epochs=3, evaluate_every=fl.every(steps=1))
    assert state.history["train/throughput/samples"] == pytest.approx([4 / 5, 8 / 10, 10 / 15] * 3)


def test_weight_in_a_second_of_training(clock):
    def by_tokens(model, batch):
        loss, _ = slow(clock)(model, batch)
        return loss, {"weight": torch.tensor(100 * len(batch))}

    state = fitted(clock, fl.throughput("weight"), step=by_tokens)
    assert state.history.latest("train/throughput/weight") == pytest.approx(1000 / 15)


def test_weights_are_added_up_exactly(clock):
    sizes = iter((2.0**24, 1.0))

    def loss_fn(model, batch):
        clock.now += 1.0
        return model.w * 1.0, {"weight": torch.tensor(next(sizes))}

    step = fl.pipeline(fl.throughput("weight"))(loss_fn)
    state = fl.fit(step, toy(), [torch.ones(1)] * 2, hooks=())
    assert state.history.latest("train/throughput/weight") == (2**24 + 1) / 2


@pytest.mark.parametrize("n", [1, 2, 3])
def test_accumulation_changes_no_rate(clock, n):
    state = fitted(clock, fl.accumulate(n), fl.throughput())
    assert state.history.latest("train/throughput/samples") == pytest.approx(10 / 15)


def test_the_utilization_of_a_device(clock):
    state = fitted(clock, fl.throughput(flops=30.0, peak=40.0))
    assert state.history.latest("train/throughput/mfu") == pytest.approx(10 / 15 * 30 / 40)
    assert state.history.latest("train/throughput/samples") == pytest.approx(10 / 15)


def test_the_rate_of_a_bare_step_is_that_of_the_update_alone(clock):
    _, out = fl.pipeline(fl.throughput())(slow(clock))(toy(), torch.ones(6))
    assert out.metrics["throughput/samples"].compute() == 6 / STEP


def test_batches_without_a_number_of_samples_need_weights(clock):
    batch = (torch.ones(2), torch.ones(3))
    loss_fn = lambda model, batch: (model.w * 1.0, {"weight": 5})
    with pytest.raises(ValueError, match=r'write throughput\(of="weight"\), which counts aux'):
        fl.pipeline(fl.throughput())(loss_fn)(toy(), batch)
    _, out = fl.pipeline(fl.throughput("weight"))(loss_fn)(toy(), batch)
    assert out.metrics["throughput/weight"].amount == 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"of": "tokens"}, 'throughput expects of as one of "samples", "weight"'),
        ({"flops": 1.0}, r"together; got flops=1\.0, peak=None"),
        ({"peak": 1.0}, r"together; got flops=None, peak=1\.0"),
        ({"flops": 0, "peak": 1.0}, "throughput expects flops > 0"),
        ({"flops": 1, "peak": "fast"}, "throughput expects peak as a number > 0"),
    ],
)
def test_wrong_settings_are_an_error_when_composing(settings, message):
    with pytest.raises(ValueError, match=message):
        fl.throughput(**settings)


# --- in any place of a pipeline, saved, and by the laws


MEMBERS = (fl.timings(), fl.throughput(flops=1.0, peak=2.0), fl.grad_norm(), fl.device_memory())


@pytest.mark.parametrize("split", [1, 2, 4])
def test_a_checkpoint_in_the_middle_of_an_interval_changes_no_number(tmp_path, clock, split):
    def run(state, **settings):
        settings = {"epochs": 2, "record_every": fl.every(steps=3), **settings}
        step = fl.pipeline(fl.timings(), fl.throughput("weight"))(slow(clock))
        batches = [torch.ones(n) for n in (1, 2, 3, 4, 5)]
        return fl.fit(step, state, (batches, [torch.ones(1)]), **{"hooks": (), **settings})

    stop = fl.when(lambda state: state.step == split)(
        lambda state: attrs.evolve(state, stop="enough")
    )
    saved = run(toy(), hooks=(stop,))
    path = fl.save(attrs.evolve(saved, stop=None), tmp_path / "a")
    assert_same(run(fl.restore(path, toy())), run(toy()), rtol=1e-12)


@pytest.mark.parametrize("member", MEMBERS, ids=repr)
@pytest.mark.parametrize("others", [(), (fl.accumulate(2), fl.metric(mean=output_mean))], ids=repr)
def test_each_keeps_the_laws(clock, monkeypatch, member, others):
    from fnloop._middleware import metric

    monkeypatch.setattr(metric, "_peak_gib", lambda device: 1.0)
    pipe = fl.pipeline(*others, member)
    law_fold(pipe, small())
    law_purity(pipe, small())
    law_no_host_reads(pipe, small())
    law_skipped_updates(pipe, small())
    law_neutral(member, fl.pipeline(*others), small())


def test_each_is_a_value():
    import pickle

    for member in MEMBERS:
        assert pickle.loads(pickle.dumps(member)) == member
    assert repr(fl.throughput("weight", flops=1.0, peak=2.0)) == (
        "throughput('weight', flops=1.0, peak=2.0)"
    )


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
    from fnloop._middleware import metric

    monkeypatch.setattr(metric, "mark", lambda device: FakeEvent(clock, log))
    return log


def test_events_are_read_at_the_report_only(clock, events):
    waited = []
    hooks = (lambda state: (waited.append(len(events)), state)[1],)
    state = fitted(clock, fl.timings(), fl.throughput(), hooks=hooks)
    assert waited[:2] == [0, 0] and waited[2] > 0
    assert state.history.latest("train/time/step") == STEP
    assert state.history.latest("train/time/data") == DATA


def test_the_time_of_a_device_runs_on_between_updates(clock, events):
    """An update counts from the end of the one before, hooks included, evaluations excluded."""
    state = fitted(clock, fl.throughput(), epochs=2)
    seconds = (DATA + STEP) + (PAUSE + DATA + STEP) * 2
    assert state.history["train/throughput/samples"] == pytest.approx([10 / seconds] * 2)
    state = fitted(clock, fl.throughput(), evaluate_every=fl.every(steps=1))
    assert state.history["train/throughput/samples"] == pytest.approx([4 / 5, 8 / 10, 10 / 15])


def test_what_a_caller_does_between_two_epochs_does_not_count(clock, events):
    step, train = fl.pipeline(fl.throughput())(slow(clock)), Data(clock, BATCHES)
    for state in fl.run(step, toy(), train, epochs=2, hooks=()):  # noqa: B007
        clock.now += 1000.0
    assert state.history["train/throughput/samples"] == pytest.approx([10 / 15] * 2)


def test_events_that_have_passed_are_not_kept(clock, events):
    total = Elapsed(0)
    for _ in range(1000):
        start, clock.now = FakeEvent(clock, events), clock.now + 1.0
        end = FakeEvent(clock, events)
        end.done = True
        total = total.combine(metrics.elapsed(1, start, end))
        assert len(total.pending) <= metrics.SETTLE
    assert total.compute() == 1.0


def test_events_are_neither_saved_nor_copied(tmp_path, clock, events):
    state = fitted(clock, fl.timings(), fl.throughput(), steps=2, epochs=1, hooks=())
    assert state.metrics["time/step"].pending
    copied = fl.snapshot(state)
    assert copied.metrics["time/step"].pending == ()
    assert copied.metrics["time/step"].compute() == STEP
    restored = fl.restore(fl.save(state, tmp_path / "a"), toy())
    new = fitted(clock, fl.timings(), fl.throughput(), state=restored, hooks=())
    assert new.history.latest("train/time/step") == STEP
    import pickle

    sent = pickle.loads(pickle.dumps(state.metrics["throughput/samples"].to_cpu()))
    assert sent.compute() == pytest.approx(8 / 10)


@pytest.mark.parametrize("order", [1, -1])
def test_times_are_measured_outside_of_a_graph(recorders, clock, order):
    members = [fl.cuda_graph(warmup=1), fl.timings(), fl.throughput("weight"), fl.device_memory()]
    batches = [torch.ones(4)] * 5
    state = fitted(clock, *members[::order], batches=batches, epochs=1)
    assert recorders
    names = ("time/step", "time/data", "throughput/weight", "memory/peak_gib")
    found = [state.history.latest(f"train/{name}") for name in names]
    assert found[1] == DATA and found[3] > 0
    assert found[0] <= STEP and found[2] >= 4 / (DATA + STEP)


def test_events_that_have_not_passed_are_kept_without_waiting(clock):
    log = []
    begun, ended, later = (FakeEvent(clock, log) for _ in range(3))
    ended.at, later.at, ended.done = begun.at + 2.0, begun.at + 5.0, True
    found = Elapsed(2, pending=((begun, ended), (ended, later))).settled(wait=False)
    assert (found.seconds, found.pending, log) == (2.0, ((ended, later),), [])
    assert found.compute() == (2.0 + 3.0) / 2


# --- the stopwatch of a run


def test_the_time_of_training_is_that_of_updates_and_their_data(clock):
    """Two epochs of three updates; neither evaluations nor hooks, nor what a caller does, count."""
    seen, watches = [], []

    def look(state):
        watches.append(state.run.stopwatch)
        if "record" in state.events:
            seen.append(state.run.stopwatch.evaluated)
        clock.now += PAUSE
        return state

    step, loaders = fl.pipeline()(slow(clock)), (Data(clock, BATCHES), [torch.ones(1)] * 2)
    for state in fl.run(step, toy(), loaders, epochs=2, hooks=(look,)):
        assert watches[-1].trained == state.epoch * 3 * (DATA + STEP)
        clock.now += 1000.0
    assert seen == [2 * EVALUATION] * 2


def test_another_metric_of_the_name_of_a_time_is_refused():
    for name in ("time/step", "time/data", "time/evaluate"):
        step = fl.pipeline(fl.timings(), fl.metric(**{name: lambda aux, batch: 1.0}))(toy_loss)
        with pytest.raises(ValueError, match=f"timings reports the metric '{name}', which another"):
            fl.fit(step, toy(), ([torch.ones(1)], [torch.ones(1)]), hooks=())
