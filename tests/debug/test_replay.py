"""replay: an update of a run is made again, bit for bit."""

import math

import attrs
import pytest
import several
import test_laws as laws
import torch
from replayed import check, recorded
from sample_middleware import decay
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import fnloop as fl
from fnloop import schedules
from fnloop.data import interleave, leave_out, take, zip_cycle
from fnloop.debug import replay
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

STEP = fl.pipeline()(toy_loss)
BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]
PLATEAU = fl.pipeline(fl.plateau("valid/loss", patience=1, mode="max"), fl.accumulate(2))


def replay_some(folder, pipe, problem):
    """Replay the update after a checkpoint, and one that is in the next epoch."""
    batches = problem.batches
    loaders = {"train": batches, "valid": batches[:2]}
    states = recorded(folder, pipe(problem.loss_fn), problem.state(), loaders, (1,), epochs=2)
    last = max(state.step for state in states)
    for update in {2, last * 3 // 4} - {0, 1}:
        step, state = pipe(problem.loss_fn), problem.state()
        made = check(folder, step, state, loaders, states, (1,), update)
    return made


# --- the bits are those of the run

FEW = [
    (PLATEAU, small()),
    (laws.SPIKES[1], small()),
    (fl.pipeline(fl.ema(0.9)), several.alternating(**laws.EACH[1])),
]


def shown(value):
    return repr(value) if isinstance(value, type(PLATEAU)) else ""


@pytest.mark.parametrize(("pipe", "problem"), FEW, ids=shown)
def test_the_bits_are_those_of_the_run(pipe, problem, tmp_path):
    replay_some(tmp_path, pipe, problem)


ALL = [
    *laws.COMBINATIONS,
    *laws.GUARDS,
    *laws.SPIKES,
    PLATEAU,
    fl.pipeline(fl.retry_on_oom(), fl.microbatch(100), fl.accumulate(2)),
    fl.pipeline(fl.ema(0.5, start=0.5), fl.swa(0.5), fl.torch_scheduler(decay)),
]
TURNS = [(pipe, several.alternating(**each)) for pipe in laws.AROUND for each in laws.EACH]
FP16 = fl.pipeline(fl.amp("fp16", init_scale=2.0**17, growth_interval=3), fl.accumulate(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pipe", "problem"),
    [
        *((pipe, problem()) for pipe in ALL for problem in (small, stochastic)),
        *((pipe, several.problem(several.muon_and_sgd)) for pipe in laws.SEVERAL),
        *TURNS,
        (FP16, laws.single_precision(small())),
    ],
    ids=shown,
)
def test_the_bits_are_those_of_the_run_in_every_combination(pipe, problem, tmp_path):
    replay_some(tmp_path, pipe, problem)


def test_an_update_has_its_batches_gradients_and_outputs(tmp_path):
    """w is 0, then -1.5; the gradient is the mean of x, and the loss w times that."""
    step = fl.pipeline(fl.accumulate(2), fl.metric(largest=lambda aux, batch: batch.max()))
    recorded(tmp_path, step(toy_loss), toy(), BATCHES, (1,), epochs=2)
    made = replay(tmp_path, step(toy_loss), toy(), BATCHES, update=2)
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


def test_before_can_be_continued_to_after(tmp_path):
    problem = stochastic()
    step = fl.pipeline(fl.ema(0.9))(problem.loss_fn)
    recorded(tmp_path, step, problem.state(), problem.batches, (1,), epochs=2)
    made = replay(tmp_path, step, problem.state(), problem.batches, update=9)
    again = fl.fit(step, made.before, problem.batches, epochs=2, steps=9, hooks=())
    assert_same(again, made.after)


def test_it_draws_from_no_generator_and_leaves_no_hook(tmp_path):
    problem, state = stochastic(), stochastic().state()
    step = fl.pipeline()(problem.loss_fn)
    recorded(tmp_path, step, problem.state(), problem.batches, (1,))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    made = replay(tmp_path, step, state, problem.batches, update=4)
    assert torch.equal(torch.rand(3), expected)
    assert_same(state, problem.state())
    optimizers = [one.optimizer for one in (state, made.before, made.after)]
    assert not any(one._optimizer_step_pre_hooks for one in optimizers)


# --- which update it is


def nan_is_skipped(pipe=()):
    bad = torch.tensor([math.nan])
    return fl.pipeline(*pipe, fl.skip_nonfinite())(toy_loss), [BATCHES[0], bad, *BATCHES[1:]]


def test_a_skipped_update_has_no_number(tmp_path):
    """Of 1, NaN, 2, 3, 4 the second update is that with 2, and begins after the NaN."""
    step, batches = nan_is_skipped()
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
    def loss_fn(model, batch, carry):
        return toy_loss(model, batch)[0], {}, carry

    step = fl.pipeline(fl.tbptt(2))(loss_fn)
    batches = [torch.tensor([[1.0, 1.0, 3.0, 3.0]]), torch.tensor([[5.0, 5.0, 7.0, 7.0]])]
    recorded(tmp_path, step, toy(), batches, (2,))
    for update, before, grad in ((3, -4, 5.0), (4, -9, 7.0)):
        made = replay(tmp_path, step, toy(), batches, update=update)
        assert made.batches[0].tolist() == [[grad, grad]]
        assert (made.before.model.w.item(), made.grads["w"].item()) == (before, grad)


def test_a_schedule_sees_the_length_of_the_run_that_made_the_update(tmp_path):
    """Planned for 4 updates, then for 8: update 6 has the rate 1 - 5/8."""
    step = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    saves = fl.every(steps=2)(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(step, toy(), BATCHES, epochs=1, hooks=(saves,))
    state = fl.fit(step, state, BATCHES, epochs=2, hooks=(saves,))
    made = replay(tmp_path, step, toy(), BATCHES, update=6)
    assert made.after.optimizer.param_groups[0]["lr"] == 1 - 5 / 8
    assert made.confirmed is True
    first = replay(tmp_path, step, toy(), BATCHES, update=4)
    assert first.after.optimizer.param_groups[0]["lr"] == 1 - 3 / 4


def test_a_phase_keeps_its_own_length(tmp_path):
    step = fl.pipeline(fl.schedule(lambda i, total: 1 - i / total))(toy_loss)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(step, toy(), BATCHES, hooks=(saves,), phase="head")
    fl.fit(step, state, BATCHES, epochs=2, hooks=(saves,), phase="all")
    made = replay(tmp_path, step, toy(), BATCHES, update=7)
    assert made.after.optimizer.param_groups[0]["lr"] == 1 - 2 / 8
    assert made.confirmed is True
    with pytest.raises(ValueError, match="update 5 is of the phase 'all', which began at step 4"):
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
        "plain": a,
        "left out": leave_out(a, lambda epoch, batch: batch == 1),
        "taken": take(a, 2),
        "in turn": interleave({"a": a, "b": b}),
        "together": zip_cycle(a=a, b=b),
        "single": DataLoader(numbered(5), batch_size=None, shuffle=True),
    }


@pytest.mark.parametrize("name", loaders())
def test_the_indices_are_those_of_the_dataset(name, tmp_path):
    step = fl.pipeline(fl.accumulate(2))(toy_rows)
    if name == "single":
        step = fl.pipeline(fl.accumulate(2))(lambda m, b: (toy_loss(m, b[0])[0], {"weight": 1}))
    states = recorded(tmp_path, step, toy(), loaders()[name], (1,), epochs=2)
    for update in range(2, max(s.step for s in states) + 1):
        made = check(tmp_path, step, toy(), loaders()[name], states, (1,), update)
        for batch, index in zip(made.batches, made.indices, strict=True):
            parts = batch if isinstance(batch, dict) else {"": batch}
            index = index if isinstance(index, dict) else {"": index}
            assert {k: (part[0] % 100).tolist() for k, part in parts.items()} == index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8.0))


def test_those_of_a_stream_and_a_list_are_unknown(tmp_path):
    for i, loader in enumerate((DataLoader(Stream(), batch_size=2), BATCHES)):
        recorded(tmp_path / str(i), STEP, toy(), loader, (1,))
        made = replay(tmp_path / str(i), STEP, toy(), loader, update=3)
        assert made.indices == (None,)


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


def test_without_indices_the_row_is_named(tmp_path):
    batches = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, math.inf])]
    step = fl.pipeline(fl.accumulate(2))(toy_loss)
    recorded(tmp_path, step, toy(w=1.0), [*BATCHES[:2], *batches], (1,))
    assert replay(tmp_path, step, toy(), [*BATCHES[:2], *batches], update=2).nonfinite == ((1, 1),)


# --- what a checkpoint confirms


def test_a_flipped_bit_is_not_confirmed(tmp_path):
    def flip(state):
        state.model.w.data.view(torch.int32).bitwise_xor_(1)
        return state

    hooks = (fl.when(lambda state: state.step == 2)(flip),)
    recorded(tmp_path / "a", STEP, toy(), BATCHES, (1, 2))
    recorded(tmp_path / "b", STEP, toy(), BATCHES, (1,))
    states = fl.fit(
        STEP, fl.resume(tmp_path / "c", toy()), BATCHES, hooks=(
            *hooks, fl.every(steps=1)(fl.checkpoint(tmp_path / "c", keep=None)),
        )
    )  # fmt: skip
    assert states.step == 4
    assert replay(tmp_path / "a", STEP, toy(), BATCHES, update=2).confirmed is True
    assert replay(tmp_path / "b", STEP, toy(), BATCHES, update=2).confirmed is None
    assert replay(tmp_path / "c", STEP, toy(), BATCHES, update=2).confirmed is False


# --- what is refused


def test_what_cannot_be_made_again_is_refused_with_the_reason(tmp_path):
    recorded(tmp_path, STEP, toy(), BATCHES, (2,), epochs=2)

    def again(update, state=None, folder=tmp_path, **targets):
        return replay(folder, STEP, state or toy(), BATCHES, update=update, **targets)

    with pytest.raises(ValueError, match=r"update 2 is before the first checkpoint.* of step 2"):
        again(2)
    with pytest.raises(ValueError, match="there is no update 9: the run ended at step 8, epoch 2"):
        again(9)
    with pytest.raises(fl.CheckpointError, match="has no whole checkpoint"):
        again(1, folder=tmp_path / "none")
    with pytest.raises(fl.CheckpointError, match="another model"):
        again(4, state=small().state())
    with pytest.raises(TypeError, match="replay expects a step"):
        replay(tmp_path, toy_loss, toy(), BATCHES, update=4)
    with pytest.raises(ValueError, match=r"replay expects update as an int >= 1"):
        again(0)
    stale = toy()
    STEP(stale, BATCHES[0])
    with pytest.raises(fl.StaleStateError):
        again(4, state=stale)


def test_on_another_number_of_processes_it_is_refused(tmp_path):
    recorded(tmp_path, STEP, toy(), BATCHES, (2,))
    two = attrs.evolve(toy(), backend=attrs.evolve(toy().backend, data_size=2))
    with pytest.raises(ValueError, match="made on 1 process, and here are 2, which"):
        replay(tmp_path, STEP, two, BATCHES, update=3)


def test_a_run_that_a_hook_stopped_has_no_update_after_it(tmp_path):
    stop = fl.when(lambda state: state.step == 3)(lambda s: attrs.evolve(s, stop="enough"))
    saves = fl.checkpoint(tmp_path, keep=None)
    state = fl.fit(STEP, toy(), BATCHES, epochs=2, hooks=(stop, saves))
    with pytest.raises(ValueError, match=r"stopped at step 3 \(enough\), and there is no later"):
        replay(tmp_path, STEP, toy(), BATCHES, update=4)
    fl.fit(STEP, attrs.evolve(state, stop=None), BATCHES, epochs=2, hooks=(saves,))
    assert replay(tmp_path, STEP, toy(), BATCHES, update=4).batches[0].item() == 4


def test_a_checkpoint_that_no_run_wrote_needs_the_targets(tmp_path):
    step = fl.pipeline(fl.schedule(schedules.linear()))(toy_loss)
    state = fl.fit(step, toy(), BATCHES, steps=2, hooks=())
    fl.save(state, tmp_path / "one")
    with pytest.raises(ValueError, match=r"one does not say how long the run was to be.*epochs="):
        replay(tmp_path, step, toy(), BATCHES, update=3)
    made = replay(tmp_path, step, toy(), BATCHES, update=3, epochs=2)
    assert made.after.optimizer.param_groups[0]["lr"] == 1 - 2 / 8


def test_plateau_needs_a_checkpoint_after_the_update(tmp_path):
    step = fl.pipeline(fl.plateau("train/loss", patience=1, mode="max"))(toy_loss)
    state = fl.fit(step, toy(), BATCHES, steps=2, hooks=())
    fl.save(state, tmp_path / "one")
    with pytest.raises(ValueError, match=r"plateau\(.*\) depends on the records of the run"):
        replay(tmp_path, step, toy(), BATCHES, update=3, epochs=2)


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


def test_a_schedule_has_the_length_of_a_run_with_a_target_in_steps(tmp_path):
    step = fl.pipeline(fl.schedule(fl.schedules.linear()))(toy_loss)
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=None))
    fl.fit(step, toy(), [torch.ones(1)] * 6, steps=4, hooks=(saves,))
    assert replay(tmp_path, step, toy(), [torch.ones(1)] * 6, update=3).confirmed
