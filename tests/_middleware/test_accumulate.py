import attrs
import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss


def batches(*values):
    return [torch.tensor([float(v)]) for v in values]


def train(*members, xs, epochs=1, **kwargs):
    return fl.fit(
        fl.pipeline(*members)(toy_loss), toy(), batches(*xs), epochs=epochs, hooks=(), **kwargs
    )


@pytest.mark.parametrize(
    ("n", "epochs", "w", "steps"),
    [
        (1, 1, -15.0, 5),
        (2, 1, -10.0, 3),  # 1.5 + 3.5 + 5
        (4, 2, -15.0, 4),  # (2.5 + 5) twice
        (5, 1, -3.0, 1),
        (9, 1, -3.0, 1),
    ],
)
def test_windows_are_averaged_and_the_last_one_too(n, epochs, w, steps):
    state = train(fl.accumulate(n), xs=[1, 2, 3, 4, 5], epochs=epochs)
    assert (state.model.w.item(), state.step, state.epoch) == (w, steps, epochs)


@pytest.mark.parametrize(
    ("members", "xs", "moved"),
    [
        ((fl.accumulate(2), fl.clip_value(1)), (3, -3), 0.0),
        ((fl.clip_value(1), fl.accumulate(2)), (3, -3), 0.0),
        ((fl.accumulate(2), fl.clip_value(1)), (4, -1), 1.0),  # the mean, 1.5, clipped
        ((fl.clip_value(1), fl.accumulate(2)), (4, -1), 0.0),  # the mean of 1 and -1
    ],
)
def test_the_listed_order_decides_what_is_clipped(members, xs, moved):
    assert train(*members, xs=xs).model.w.item() == -moved


@pytest.mark.parametrize("inside", [(), (fl.clip_value(100.0),)], ids=["in place", "averaged"])
def test_unequal_batches_count_by_their_items(inside):
    step = fl.pipeline(*inside, fl.accumulate(2))(toy_loss)
    state, out = step(toy(), [torch.tensor([1.0]), torch.tensor([5.0, 6.0, 7.0, 9.0])])
    assert state.model.w.item() == pytest.approx(-(1 + 5 + 6 + 7 + 9) / 5)
    assert out.weight == 5


@pytest.mark.parametrize("inside", [(), (fl.clip_value(100.0),)], ids=["in place", "averaged"])
@pytest.mark.parametrize(
    "weigh", [int, torch.tensor, lambda n: torch.tensor(float(n))], ids=["int", "tensor", "float"]
)
def test_token_counts_weigh_micro_batches(inside, weigh):
    """1 token with gradient 8 and 3 with mean gradient 4: the mean over tokens is 5, not 6."""

    def tokens(model, batch):
        x, count = batch
        return (model.w * x).sum(), {"weight": weigh(count)}

    step = fl.pipeline(*inside, fl.accumulate(2))(tokens)
    state, out = step(toy(w=0.0), [(torch.tensor(8.0), 1), (torch.tensor(4.0), 3)])
    assert state.model.w.item() == -5.0
    assert float(out.weight) == 4


@pytest.mark.parametrize("inside", [(), (fl.clip_value(100.0),)], ids=["in place", "averaged"])
@pytest.mark.parametrize("zero", [0, torch.tensor(0)], ids=["int", "tensor"])
def test_a_micro_batch_without_items_counts_nothing(inside, zero):
    def tokens(model, batch):
        x, count = batch
        return (model.w * x).sum(), {"weight": count}

    step = fl.pipeline(*inside, fl.accumulate(2))(tokens)
    x = torch.tensor(4.0)
    state, _ = step(toy(), [(x, zero), (x, zero + 2)])
    assert state.model.w.item() == -4.0
    state, _ = step(state, [(x, zero), (x, zero)])  # nothing at all: the gradient is zero
    assert state.model.w.item() == -4.0


@pytest.mark.parametrize("inside", [(), (fl.clip_value(100.0),)], ids=["in place", "averaged"])
def test_a_skipped_micro_batch_is_left_out_of_the_window(inside):
    odd = fl.Middleware(
        "odd",
        forward=lambda step: (
            lambda s, b: (s, attrs.evolve(step(s, b)[1], skip="odd" if b[0] == 100 else None))
        ),
    )
    step = fl.pipeline(odd, *inside, fl.accumulate(3))(toy_loss)
    state, out = step(toy(), batches(1, 100, 3))
    assert (state.model.w.item(), out.weight, state.step) == (-2.0, 2, 1)
    state, out = step(state, batches(100, 100))
    assert (state.model.w.item(), out.skip, state.step, state.skipped) == (-2.0, "odd", 1, 1)


def test_a_parameter_that_only_some_micro_batches_use_has_a_gradient_of_zero_in_the_others():
    model = torch.nn.ModuleDict(
        {"a": torch.nn.Linear(1, 1, bias=False), "b": torch.nn.Linear(1, 1, bias=False)}
    )
    for part in model.values():
        torch.nn.init.zeros_(part.weight)

    def loss_fn(model, batch):
        x, part = batch
        return model[part](x).mean(), {"weight": 1}

    window = [(torch.tensor([[2.0]]), "a"), (torch.tensor([[6.0]]), "b")]
    for inside in ((), (fl.clip_value(100.0),)):
        state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
        state, _ = fl.pipeline(*inside, fl.accumulate(2))(loss_fn)(fl.snapshot(state), window)
        assert [part.weight.item() for part in state.model.values()] == [-1.0, -3.0]


def test_metrics_of_a_window_are_combined():
    step = fl.pipeline(
        fl.metric(top=lambda aux, batch: fl.Max(batch.max())), fl.accumulate(2), fl.clip(1e9)
    )(toy_loss)
    _, out = step(toy(), batches(3, 5))
    assert {name: metric.compute() for name, metric in out.metrics.items()} == {
        "top": 5.0,
        "grad_norm": 4.0,
    }


def test_the_norm_of_each_micro_batch_is_averaged_where_each_is_clipped():
    _, out = fl.pipeline(fl.clip(1e9), fl.accumulate(2))(toy_loss)(toy(), batches(3, -5))
    assert out.metrics["grad_norm"].compute() == 4.0


@pytest.mark.parametrize("n", [0, -1])
def test_n_is_at_least_one(n):
    with pytest.raises(
        ValueError,
        match=rf"accumulate expects n as an int >= 1, the batches per update \(1 changes "
        rf"nothing\); got {n}",
    ):
        fl.accumulate(n)


@pytest.mark.parametrize("n", [2.0, "2", True, None])
def test_n_is_an_int(n):
    with pytest.raises(
        TypeError, match="accumulate expects n as an int >= 1, the batches per update"
    ):
        fl.accumulate(n)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (torch.ones(2), TypeError, r"Write step\(state, \[batch\]\)"),
        ({"x": torch.ones(2)}, TypeError, "got one dict"),
        ([], ValueError, "takes 1 to 2 batches at once; got 0"),
        ([torch.ones(1)] * 3, ValueError, "got 3"),
    ],
)
def test_a_step_that_accumulates_wants_a_window(window, error, message):
    with pytest.raises(error, match=message):
        fl.pipeline(fl.accumulate(2))(toy_loss)(toy(), window)


# --- another window in later epochs


def by_epoch(n, state=None, batches=10, **kwargs):
    """Return how many batches each update of a run took, and the state."""
    taken, calls = [], []

    def loss_fn(model, batch):
        calls.append(1)
        return toy_loss(model, batch)

    def note(state):
        if "update" in state.events:
            taken.append(len(calls))
            calls.clear()
        return state

    step = fl.pipeline(fl.accumulate(n))(loss_fn)
    ones = [torch.ones(1)] * batches
    state = toy() if state is None else state
    return taken, fl.fit(step, state, ones, **{"hooks": (note,), "epochs": 1, **kwargs})


def test_a_mapping_says_the_window_from_an_epoch_on():
    taken, state = by_epoch({1: 4, 3: 2}, epochs=4, batches=6)
    assert taken == [1] * 6 + [4, 2] + [4, 2] + [2, 2, 2]
    assert (state.step, state.model.w.item()) == (13, -13.0)


def test_the_epochs_of_a_mapping_are_those_of_the_phase():
    taken, state = by_epoch({0: 2, 1: 1}, epochs=2, batches=4, phase="a")
    more, state = by_epoch({0: 2, 1: 1}, state, epochs=2, batches=4, phase="b")
    assert taken == more == [2, 2, 1, 1, 1, 1]


def test_a_schedule_knows_the_length_of_a_run_whose_windows_vary():
    totals, lengths = [], []

    def factor(i, total):
        totals.append((i, total))
        return 1.0

    def note(state):
        lengths.append((state.run.window, state.run.steps_per_epoch))
        return state

    step = fl.pipeline(fl.accumulate({0: 3, 1: 2}), fl.schedule(factor))(toy_loss)
    ones = [torch.ones(1)] * 6
    half = fl.fit(step, toy(), ones, epochs=3, hooks=(note, lambda s: attrs_stop(s, 4)))
    fl.fit(step, attrs.evolve(half, stop=None), ones, epochs=3, hooks=(note,))
    assert totals == [(i, 8) for i in range(8)]  # 2 + 3 + 3
    assert lengths == [(3, 2)] * 2 + [(2, 3)] * 6


def attrs_stop(state, step):
    return attrs.evolve(state, stop="pause") if state.step == step else state


def test_a_fraction_of_an_epoch_knows_its_window():
    seen = []
    note = fl.every(epochs=0.5)(lambda state: seen.append(state.step) or state)
    by_epoch({0: 2, 1: 1}, epochs=2, batches=8, hooks=(note,))
    assert seen == [2, 4, 8, 12]


@pytest.mark.parametrize(
    ("n", "error", "message"),
    [
        ({}, ValueError, "at least one epoch"),
        ({0: 0}, ValueError, "n as an int >= 1"),
        ({-1: 2}, ValueError, "an epoch of n"),
        ({0.5: 2}, TypeError, "an epoch of n"),
        ({0: "4"}, TypeError, "n as an int"),
    ],
)
def test_a_wrong_mapping_is_refused(n, error, message):
    with pytest.raises(error, match=message):
        fl.accumulate(n)
    assert repr(fl.accumulate({0: 8, 4: 4})) == "accumulate({0: 8, 4: 4})"


def test_a_run_that_ends_before_its_window_changes_has_the_length_of_its_epochs():
    stop = fl.once(lambda state: attrs.evolve(state, stop=f"{state.run.total_steps}"))
    _, state = by_epoch({0: 2, 5: 1}, epochs=2, batches=4, hooks=(stop,))
    assert state.stop == "4"


@pytest.mark.parametrize("n", [2, {0: 2, 3: 1}])
def test_the_length_of_a_run_without_end_is_known_at_once(n):
    stop = fl.once(lambda state: attrs.evolve(state, stop=f"{state.run.total_steps}"))
    _, state = by_epoch(n, epochs=10**9, batches=4, hooks=(stop,))
    assert state.stop == ("2000000000" if n == 2 else f"{3 * 2 + (10**9 - 3) * 4}")
