"""bisect: the first update at which two runs diverge, and what differs in it first."""

import math

import attrs
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop.debug import _diff, bisect
from fnloop.testing import Problem, small, toy, toy_loss

PROBLEM = small()
BAD = 9  # the update with the fault, of 14: the second of the second epoch
USUAL = fl.pipeline()(PROBLEM.loss_fn)


def is_bad(state):
    return state.step + 1 == BAD


def in_module(i):
    """The output of a module is another, in one update."""

    def wrap(step):
        def faulty(state, batch):
            module = state.model[i]
            module.forward = lambda x: type(module).forward(module, x) + 1e-9
            try:
                return step(state, batch)
            finally:
                del module.forward

        return lambda state, batch: (faulty if is_bad(state) else step)(state, batch)

    return fl.Middleware("fault", forward=wrap)


def fault(ring, change):
    """A middleware that changes what the bad update returns, or its gradients."""

    def wrap(step):
        def faulty(state, batch):
            state, out = step(state, batch)
            return state, change(state, out) if is_bad(state) else out

        return faulty

    return fl.Middleware("fault", **{ring: wrap})


def other_gradient(state, out):
    state.model.get_parameter("2.bias").grad += 1e-9
    return out


def saved_run(folder, step, state, batches, every, *hooks):
    saves = fl.every(steps=every)(fl.checkpoint(folder, keep=None))
    fl.fit(step, state, batches, epochs=2, hooks=(*hooks, saves))


def found_in(folder, steps, batches=PROBLEM.batches, make=PROBLEM.state, every=2):
    """Make two runs, of a step and batches each or the same ones, and bisect them."""
    of_each = [one if isinstance(one, tuple) else (one, one) for one in (steps, batches)]
    for name, step, its in zip("ab", *of_each, strict=True):
        saved_run(folder / name, step, make(), its, every)
    state = make()
    found = bisect(folder / "a", folder / "b", steps, state, batches)
    fl.snapshot(state)  # it is still usable
    return found


LOSS = fault("loss", lambda state, out: attrs.evolve(out, loss=out.loss * (1 + 1e-9)))
LEFT_OUT = fault(
    "gradient", lambda state, out: attrs.evolve(out, skip=None if state.skipped else "a fault")
)
FAULTS = [
    ("module", "1", in_module(1)),
    ("loss", "", LOSS),
    ("gradient", "2.bias", fault("gradient", other_gradient)),
    ("optimizer", "optimizer.param_groups.0.lr", fl.schedule(lambda i, n: 1 + (i + 1 == BAD))),
    ("skipped", "", LEFT_OUT),
]


@pytest.mark.parametrize(("what", "name", "fault"), [
    pytest.param(*one, id=one[0], marks=() if one[0] == "gradient" else pytest.mark.slow)
    for one in FAULTS
])  # fmt: skip
def test_a_fault_in_one_update_is_found_and_named(what, name, fault, tmp_path):
    usual = fl.pipeline(fl.schedule(lambda i, n: 1.0))(PROBLEM.loss_fn)
    steps = (usual if what == "optimizer" else USUAL), fl.pipeline(fault)(PROBLEM.loss_fn)
    found = found_in(tmp_path, steps, every=3)
    assert (found.update, found.what, found.name) == (BAD, what, name)
    assert found and found.between == (6, 14 if what == "skipped" else 9)
    assert "update=9" in repr(found) and what in found._repr_html_()


@pytest.mark.slow
def test_another_batch_is_found(tmp_path):
    """A sample changes between the two runs: in the fifth batch, and so in update 5."""
    x, y = PROBLEM.batches[4]
    batches = [*PROBLEM.batches[:4], (x + 1, y), *PROBLEM.batches[5:]]
    found = found_in(tmp_path, USUAL, ({"train": PROBLEM.batches}, {"train": batches}))
    assert (found.update, found.what, found.between) == (5, "batch", (4, 6))
    assert found.text.startswith("6 of 6 elements differ, by up to 1")


@pytest.mark.parametrize(("changed", "order", "text"), [
    (3.5, range(6), "1 of 2 elements differ, by up to 0.5; first at [1]: 3 and 3.5, "
     "2,097,152 ulps apart; both have samples 2, 3"),
    (3.0, (0, 1, 2, 2, 4, 5), "1 of 2 elements differ, by up to 1; first at [1]: 3 and 2, "
     "4,194,304 ulps apart; one has samples 2, 3, and the other 2, 2"),
])  # fmt: skip
def test_the_samples_of_another_batch_are_named(changed, order, text, tmp_path):
    """Sample 3 has changed, or its place."""
    data = [torch.tensor(float(i)) for i in range(6)]
    other = [*data[:3], torch.tensor(changed), *data[4:]]
    loaders = DataLoader(data, batch_size=2), DataLoader(other, batch_size=2, sampler=order)
    pair = tuple({"train": loader} for loader in loaders)
    found = found_in(tmp_path, fl.pipeline()(toy_loss), pair, toy, every=1)
    assert (found.update, found.what, found.text) == (2, "batch", text)


@pytest.mark.slow
def test_a_list_of_two_batches_that_are_mappings_is_one_loader(tmp_path):
    def loss_fn(model, batch):
        return toy_loss(model, batch["x"])

    step, batches = fl.pipeline()(loss_fn), [{"x": torch.ones(1)}, {"x": torch.ones(1)}]
    for name in ("a", "b"):
        saves = fl.every(steps=1)(fl.checkpoint(tmp_path / name, keep=None))
        fl.fit(step, toy(), batches, hooks=(saves,))
    assert not bisect(tmp_path / "a", tmp_path / "b", [step, step], toy(), batches)


def test_other_draws_are_found(tmp_path):
    """The other loss function draws once more before the model does."""
    net = Problem(
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Dropout(0.5), nn.Linear(4, 1)).double(),
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]),
        PROBLEM.batches,
    )

    def drawing(model, batch):
        if len(batch[0]) == 3:  # the third batch
            torch.rand(1)
        return net.loss_fn(model, batch)

    steps = fl.pipeline()(net.loss_fn), fl.pipeline()(drawing)
    found = found_in(tmp_path, steps, net.batches, net.state)
    assert (found.update, found.what, found.name) == (3, "draws", "1")
    assert "before 1 (Dropout) was called, one had drawn other numbers" in found.text


def test_a_flipped_bit_is_found_and_named(tmp_path):
    """No script makes it: the run that has it is not what its script makes again."""

    def flip(state):
        with torch.no_grad():
            state.model[2].weight.view(torch.int64)[0, 5].bitwise_xor_(1)
        return state

    for name, *hooks in (("good",), ("bad", fl.when(lambda state: state.step == BAD)(flip))):
        saved_run(tmp_path / name, USUAL, PROBLEM.state(), PROBLEM.batches, 3, *hooks)
    for bad, names in (("b", ("good", "bad")), ("a", ("bad", "good"))):
        found = bisect(*(tmp_path / n for n in names), USUAL, PROBLEM.state(), PROBLEM.batches)
        assert (found.update, found.what, found.name) == (None, "not made again", bad)
        assert found.between == (6, 9)
        assert "model.2.weight of its checkpoint is not what it becomes again" in found.text
        measured = found.difference.tensor.measured
        assert (measured.elements, measured.index, measured.steps) == (1, (0, 5), 1)


@pytest.mark.slow
def test_restores_grow_with_the_logarithm_of_the_checkpoints(tmp_path, monkeypatch):
    """With 64 checkpoints: 7 comparisons, and two runs, each continued and made again once."""
    batches = [torch.tensor([float(i)]) for i in range(32)]
    other = lambda model, batch: toy_loss(model, batch)[0] * (1 + (batch.item() == 21))
    steps = fl.pipeline()(toy_loss), fl.pipeline()(other)
    read, reads = _diff.read_alone, []
    counted = lambda *given, **settings: reads.append(given) or read(*given, **settings)
    monkeypatch.setattr(_diff, "read_alone", counted)
    found = found_in(tmp_path, steps, batches, toy, every=1)
    assert (found.update, found.what) == (22, "loss")
    assert len(reads) == found.restores - 4 <= 2 * (1 + math.log2(64))


def test_equal_runs_and_runs_that_differ_from_the_beginning(tmp_path):
    equal = found_in(tmp_path, USUAL, every=7)
    assert not equal and equal.text == "the runs are equal" and equal.between == (14, None)
    saved_run(tmp_path / "c", USUAL, PROBLEM.state(seed=1), PROBLEM.batches, 7)
    found = bisect(tmp_path / "a", tmp_path / "c", USUAL, PROBLEM.state(), PROBLEM.batches)
    assert (found.update, found.what, found.between) == (None, "beginning", (None, 7))
    assert found.difference.findings[0].name == "seed"


def test_what_is_refused(tmp_path):
    given = PROBLEM.state(), PROBLEM.batches
    saved_run(tmp_path / "a", USUAL, PROBLEM.state(), PROBLEM.batches, 4)
    fl.fit(USUAL, PROBLEM.state(), given[1], steps=1, hooks=(fl.checkpoint(tmp_path / "b"),))
    said = "no checkpoint of the same step: those of a are of steps 4 to 14, and those of b of"
    with pytest.raises(ValueError, match=said):
        bisect(tmp_path / "a", tmp_path / "b", USUAL, *given)
    (tmp_path / "none").mkdir()
    with pytest.raises(fl.CheckpointError, match="none has no whole checkpoint"):
        bisect(tmp_path / "a", tmp_path / "none", USUAL, *given)
