"""replay: an update of a run is made again, bit for bit."""

import math

import attrs
import pytest
import several
import test_laws as laws
import torch
from loop_cases import generators
from replayed import check, recorded
from sample_hooks import stop_at
from sample_middleware import decay
from sample_steps import carried
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnloop as fl
from fnloop import schedules
from fnloop.data import interleave, leave_out, take, zip_cycle
from fnloop.debug import replay
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

STEP = fl.pipeline()(toy_loss)
BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
PLATEAU = fl.pipeline(fl.plateau("valid/loss", patience=1, mode="max"), fl.accumulate(2))


# --- the bits are those of the run


def shown(value):
    return repr(value) if isinstance(value, type(PLATEAU)) else ""


ALL = [
    *laws.COMBINATIONS, *laws.GUARDS, *laws.SPIKES, PLATEAU,
    fl.pipeline(fl.retry_on_oom(), fl.microbatch(100), fl.accumulate(2)),
    fl.pipeline(fl.ema(0.5, start=0.5), fl.swa(0.5), fl.torch_scheduler(decay)),
]  # fmt: skip
FP16 = fl.pipeline(fl.amp("fp16", init_scale=2.0**17, growth_interval=3), fl.accumulate(2))


def in_turn(groups):
    """Return rows of groups: of each group one is slow, the others are long."""
    for i, rows in enumerate(groups):
        for j, row in enumerate(rows):
            marks = [pytest.mark.slow, *[pytest.mark.long] * (i % len(rows) != j)]
            yield pytest.param(*row, marks=marks)


@pytest.mark.parametrize(("pipe", "problem"), [
    (PLATEAU, small()), (laws.SPIKES[1], small()),
    (fl.pipeline(fl.ema(0.9)), several.alternating(**laws.EACH[1])),
    *in_turn([[(pipe, problem()) for problem in (small, stochastic)] for pipe in ALL]),
    *in_turn([[(pipe, several.problem(several.muon_and_sgd))] for pipe in laws.SEVERAL]),
    *in_turn([[(pipe, several.alternating(**o)) for pipe in laws.AROUND] for o in laws.EACH]),
    *in_turn([[(FP16, laws.single_precision(small()))]]),
], ids=shown)  # fmt: skip
def test_the_bits_are_those_of_the_run_in_every_combination(pipe, problem, tmp_path):
    """Replay the update after a checkpoint, and one that is in the next epoch."""
    step, batches = pipe(problem.loss_fn), problem.batches
    loaders = {"train": batches, "valid": batches[:2]}
    states = recorded(tmp_path, step, problem.state(), loaders, (1,), epochs=2)
    last = max(state.step for state in states)
    for update in {2, last * 3 // 4} - {0, 1}:
        step = pipe(problem.loss_fn)
        check(tmp_path, step, problem.state(), loaders, states, (1,), update)


def test_an_update_has_its_batches_gradients_and_outputs(tmp_path):
    """w is 0, then -1.5; the gradient is the mean of x, and the loss w times that."""
    step = fl.pipeline(fl.accumulate(2), fl.metric(largest=lambda aux, batch: batch.max()))
    recorded(tmp_path, step(toy_loss), toy(), BATCHES, (1,), epochs=2)
    drawn, state = generators(), toy()
    made = replay(tmp_path, step(toy_loss), state, BATCHES, update=2)
    assert generators() == drawn
    assert_same(state, toy())
    optimizers = [one.optimizer for one in (state, made.before, made.after)]
    assert not any(one._optimizer_step_pre_hooks for one in optimizers)
    assert [batch.item() for batch in made.batches] == [3, 4]
    assert (made.before.model.w.item(), made.after.model.w.item()) == (-1.5, -5)
    assert {name: grad.item() for name, grad in made.grads.items()} == {"w": 3.5}
    assert [out.loss.item() for out in made.outputs] == [-4.5, -6]
    assert [out.metrics["largest"].compute() for out in made.outputs] == [3, 4]
    assert made.output.loss.item() == -1.5 * 3.5
    assert (made.before.step, made.before.batch) == (1, 2)
    assert (made.after.step, made.after.epoch, made.after.batch) == (2, 1, 0)
    assert made.confirmed is None
    assert repr(made) == "Update(update=2, epoch=0, batch=2, loss=-5.25, gradient norm=3.5)"
    assert "gradient norm" in made._repr_html_()


def test_gradients_are_those_that_the_optimizer_took(tmp_path):
    """Clipped from 3 to 1; and those that a closure has computed."""
    for i, member in enumerate((fl.clip(1.0), fl.closure())):
        step, folder = fl.pipeline(member)(toy_loss), tmp_path / str(i)
        recorded(folder, step, toy(), BATCHES, (1,))
        made = replay(folder, step, toy(), BATCHES, update=3)
        assert made.grads["w"].item() == pytest.approx([1, 3][i], abs=1e-5)


# --- which update it is


def test_a_skipped_update_has_no_number(tmp_path):
    """Of 1, NaN, 2, 3, 4 the second update is that with 2, and begins after the NaN."""
    step = fl.pipeline(fl.skip_nonfinite())(toy_loss)
    batches = [BATCHES[0], torch.tensor([math.nan]), *BATCHES[1:]]
    states = recorded(tmp_path, step, toy(), batches, (1,))
    made = check(tmp_path, step, toy(), batches, states, (1,), 2)
    assert (made.before.step, made.before.skipped, made.before.batch) == (1, 1, 2)
    assert (made.batches[0].item(), made.after.step, made.after.skipped) == (2, 2, 1)


def test_of_an_update_that_was_made_twice_it_is_the_first_after_the_checkpoint(tmp_path):
    """Of losses 1, 2, 9, 3 the 9 is a spike, after which the run goes back to step 1."""

    def loss_fn(model, batch):
        return model.w - model.w.detach() + batch.mean()

    step = fl.pipeline(fl.spike_guard(1, 3.0, then="back"))(loss_fn)
    batches = [torch.tensor([x]) for x in (1.0, 2.0, 9.0, 3.0, 4.0)]
    states = recorded(tmp_path, step, toy(), batches, (0, 1, 2, 3))
    steps = [state.step for state in states]
    assert steps == [0, 1, 2, 2, 3, 4], "the run has gone back to a snapshot of the same step"
    for update, batch in ((3, 3.0), (4, 4.0)):
        made = replay(tmp_path, step, toy(), batches, update=update)
        assert made.batches[0].item() == batch


def test_with_turns_an_update_is_a_round(tmp_path):
    problem = several.alternating(order=("rest", "rest", "matrices"))
    step = fl.pipeline()(problem.loss_fn)
    states = recorded(tmp_path, step, problem.state(), problem.batches, (1,))
    made = check(tmp_path, step, problem.state(), problem.batches, states, (1,), 3)
    assert len(made.outputs) == 3 and len(made.batches) == 1
    assert made.grads.keys() == dict(problem.state().model.named_parameters()).keys()
    assert dict(made.before.updates) == {"matrices": 2, "rest": 4}


def test_with_tbptt_an_update_has_one_window(tmp_path):
    step = fl.pipeline(fl.tbptt(2))(carried)
    batches = [torch.tensor([[1.0, 1.0, 3.0, 3.0]]), torch.tensor([[5.0, 5.0, 7.0, 7.0]])]
    recorded(tmp_path, step, toy(), batches, (2,))
    for update, before, grad in ((3, -4, 5.0), (4, -9, 7.0)):
        made = replay(tmp_path, step, toy(), batches, update=update)
        assert made.batches[0].tolist() == [[grad, grad]]
        assert (made.before.model.w.item(), made.grads["w"].item()) == (before, grad)


@pytest.mark.parametrize(("first", "second", "rates"), [
    ({"epochs": 1}, {"epochs": 2}, {4: 1 - 3 / 4, 6: 1 - 5 / 8}),  # planned for 4, then for 8
    ({"phase": "head"}, {"phase": "all", "epochs": 2}, {7: 1 - 2 / 8}),
    ({"steps": 3}, {"steps": 4}, {3: 1 - 2 / 3, 4: 1 - 3 / 4}),
])  # fmt: skip
def test_a_schedule_sees_the_length_of_the_run_that_made_the_update(first, second, rates, tmp_path):
    step = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(step, toy(), BATCHES, hooks=(saves,), **first)
    fl.fit(step, state, BATCHES, hooks=(saves,), **second)
    for update, rate in rates.items():
        made = replay(tmp_path, step, toy(), BATCHES, update=update)
        assert made.after.optimizer.param_groups[0]["lr"] == rate
        assert made.confirmed is True
    if "phase" in first:
        message = "update 5 is of the phase 'all', which began at step 4"
        with pytest.raises(ValueError, match=message):
            replay(tmp_path, step, toy(), BATCHES, update=5)


# --- which samples


def numbered(n, first=0.0):
    return TensorDataset(torch.arange(first, first + n))


def toy_rows(model, batch):
    parts = batch.values() if isinstance(batch, dict) else (batch,)
    return sum(toy_loss(model, part[0])[0] for part in parts), {"weight": 1}


def loaders():
    """Name to loader, whose samples are their own indices (those of ``b`` begin at 100)."""
    a = DataLoader(numbered(10), batch_size=3, shuffle=True)
    b = DataLoader(numbered(10, 100.0), batch_size=3, shuffle=True)
    return {
        "plain": a, "left out": leave_out(a, lambda epoch, batch: batch == 1), "taken": take(a, 2),
        "in turn": interleave({"a": a, "b": b}), "together": zip_cycle(a=a, b=b),
        "single": DataLoader(numbered(5), batch_size=None, shuffle=True),
    }  # fmt: skip


@pytest.mark.parametrize("name", loaders())
def test_the_indices_are_those_of_the_dataset(name, tmp_path):
    step = fl.pipeline(fl.accumulate(2))(toy_rows)
    states = recorded(tmp_path, step, toy(), loaders()[name], (1,), epochs=2)
    for update in range(2, max(s.step for s in states) + 1):
        made = check(tmp_path, step, toy(), loaders()[name], states, (1,), update)
        for batch, index in zip(made.batches, made.indices, strict=True):
            parts = batch if isinstance(batch, dict) else {"": batch}
            index = index if isinstance(index, dict) else {"": index}
            assert {k: (part[0] % 100).tolist() for k, part in parts.items()} == index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, math.inf]))


@pytest.mark.parametrize(
    "batches", [DataLoader(Stream(), batch_size=2), [*DataLoader(Stream(), 2)]]
)
def test_of_a_stream_and_a_list_the_row_is_named(batches, tmp_path):
    step = fl.pipeline(fl.accumulate(2))(toy_loss)
    recorded(tmp_path, step, toy(w=1.0), batches, (1,))
    made = replay(tmp_path, step, toy(), batches, update=2)
    assert made.indices == (None, None) and made.nonfinite == ((1, 1),)


@pytest.mark.slow
def test_workers_and_random_augmentation(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return torch.rand(6, dtype=torch.float64), torch.tensor([i / 12]).double()

    problem = attrs.evolve(stochastic(), loss_fn=small().loss_fn)
    for workers in (0, 2):
        loader = DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=workers)
        step, folder = fl.pipeline()(problem.loss_fn), tmp_path / str(workers)
        states = recorded(folder, step, problem.state(), loader, (2,), epochs=3)
        made = check(folder, step, problem.state(), loader, states, (2,), 11)
        assert [round(i * 12) for i in made.batches[0][1][:, 0].tolist()] == made.indices[0]


@pytest.mark.parametrize("members", [(), (fl.accumulate(2),)], ids=repr)
def test_a_sample_that_is_not_finite_is_named(members, tmp_path):
    x = torch.arange(1.0, 13.0)
    x[7] = math.nan
    loader = DataLoader(x, batch_size=3, shuffle=True)
    step = fl.pipeline(*members)(toy_loss)
    recorded(tmp_path, step, toy(), loader, (0,), epochs=1)
    last = 2 if members else 4
    made = [replay(tmp_path, step, toy(), loader, update=u) for u in range(1, last + 1)]
    at = next(i for i, one in enumerate(made) if any(7 in index for index in one.indices))
    assert [one.nonfinite for one in made] == [()] * at + [(7,)] + [None] * (last - at - 1)
    assert "not finite=sample 7" in repr(made[at])
    after = [repr(one) for one in made[at + 1 :]]
    assert all("not finite=the weights before the update" in text for text in after)


# --- what a checkpoint confirms


def test_a_flipped_bit_is_not_confirmed(tmp_path):
    @fl.when(lambda state: state.step == 2)
    def flip(state):
        state.model.w.data.view(torch.int32).bitwise_xor_(1)
        return state

    saves = fl.every(steps=1)(fl.checkpoint(tmp_path / "c", keep=None))
    recorded(tmp_path / "a", STEP, toy(), BATCHES, (1, 2))
    recorded(tmp_path / "b", STEP, toy(), BATCHES, (1,))
    fl.fit(STEP, toy(), BATCHES, hooks=(flip, saves))
    for folder, confirmed in (("a", True), ("b", None), ("c", False)):
        assert replay(tmp_path / folder, STEP, toy(), BATCHES, update=2).confirmed is confirmed


# --- what is refused

TWO_PROCESSES = attrs.evolve(toy(), backend=attrs.evolve(toy().backend, data_size=2))


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"update": 2}, ValueError, r"update 2 is before the first checkpoint.* of step 2"),
    ({"update": 9}, ValueError, "no update 9: the run ended at step 8, epoch 2"),
    ({"folder": "none"}, fl.CheckpointError, "none does not exist. Checkpoints are written by fit"),
    ({"state": small().state()}, fl.CheckpointError, "another model"),
    ({"step": toy_loss}, TypeError, "replay expects a step"),
    ({"update": 0}, ValueError, "replay expects update as an int >= 1"),
    ({"state": TWO_PROCESSES}, ValueError, "made on 1 process, and here are 2, which"),
])  # fmt: skip
def test_what_cannot_be_made_again_is_refused_with_the_reason(given, error, message, tmp_path):
    recorded(tmp_path, STEP, toy(), BATCHES, (2,), epochs=2)
    folder, step, state = tmp_path / given.get("folder", ""), given.get("step", STEP), toy()
    with pytest.raises(error, match=message):
        replay(folder, step, given.get("state", state), BATCHES, update=given.get("update", 4))
    STEP(state, BATCHES[0])
    with pytest.raises(fl.StaleStateError):
        replay(tmp_path, STEP, state, BATCHES, update=4)


def test_a_run_that_a_hook_stopped_has_no_update_after_it(tmp_path):
    saves = fl.checkpoint(tmp_path, keep=None)
    state = fl.fit(STEP, toy(), BATCHES, epochs=2, hooks=(stop_at(3), saves))
    with pytest.raises(ValueError, match=r"stopped at step 3 \(enough\), and there is no later"):
        replay(tmp_path, STEP, toy(), BATCHES, update=4)
    fl.fit(STEP, attrs.evolve(state, stop=None), BATCHES, epochs=2, hooks=(saves,))
    assert replay(tmp_path, STEP, toy(), BATCHES, update=4).batches[0].item() == 4


@pytest.mark.parametrize(("member", "targets", "message"), [
    (fl.schedule(schedules.linear()), {}, r"one does not say how long the run was to be"),
    (fl.plateau("train/loss", patience=1, mode="max"), {"epochs": 2},
        r"plateau\(.*\) depends on the records of the run"),
    (fl.schedule(schedules.linear()), {"epochs": 2}, None),
])  # fmt: skip
def test_a_checkpoint_that_no_run_wrote_needs_the_targets(member, targets, message, tmp_path):
    step = fl.pipeline(member)(toy_loss)
    fl.save(fl.fit(step, toy(), BATCHES, steps=2, hooks=()), tmp_path / "one")
    make = lambda: replay(tmp_path, step, toy(), BATCHES, update=3, **targets)
    if message is None:
        assert make().after.optimizer.param_groups[0]["lr"] == 1 - 2 / 8
    else:
        with pytest.raises(ValueError, match=message):
            make()


def test_the_newest_checkpoint_is_enough_for_an_update_that_failed(tmp_path):
    """A run that crashes leaves no checkpoint after the update."""
    saves = fl.every(steps=2)(fl.checkpoint(tmp_path))

    def fails(model, batch):
        if batch.item() == 4:
            raise ArithmeticError("four")
        return toy_loss(model, batch)

    step = fl.pipeline()(fails)
    with pytest.raises(ArithmeticError):
        fl.fit(step, toy(), BATCHES, epochs=2, hooks=(saves,))
    assert replay(tmp_path, step, toy(), BATCHES, update=3).batches[0].item() == 3
    with pytest.raises(ArithmeticError) as caught:
        replay(tmp_path, step, toy(), BATCHES, update=4)
    assert "batch 3, step 3" in caught.value.__notes__[0]
