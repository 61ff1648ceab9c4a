"""torch_scheduler: a hand-written loop, runs of another length, and wrong factories."""

import attrs
import pytest
import torch
from torch.optim import lr_scheduler

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)


TORCH = [
    lambda opt, run: lr_scheduler.StepLR(opt, 2, gamma=0.5),
    lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=run.total_steps),
    lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, run.steps_per_epoch * run.epochs),
    lambda opt, run: lr_scheduler.SequentialLR(
        opt,
        [lr_scheduler.ConstantLR(opt, 0.1, 2), lr_scheduler.ExponentialLR(opt, 0.9)],
        milestones=[2],
    ),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch's own, from SequentialLR
@pytest.mark.parametrize("factory", TORCH)
def test_it_equals_a_hand_written_loop(factory):
    xs = [torch.tensor([float(x)]) for x in (1, 2, 3)]
    state = fl.fit(
        fl.pipeline(fl.torch_scheduler(factory))(toy_loss), toy(), xs, epochs=2, hooks=()
    )

    by_hand = toy()
    scheduler = factory(by_hand.optimizer, fl.RunInfo(epochs=2, total_steps=6, steps_per_epoch=3))
    for x in xs * 2:
        by_hand.optimizer.zero_grad()
        toy_loss(by_hand.model, x)[0].backward()
        by_hand.optimizer.step()
        scheduler.step()
    assert torch.equal(state.model.w, by_hand.model.w)
    assert state.slots["torch_scheduler"].last_epoch == 6


def test_a_skipped_update_does_not_step_the_scheduler():
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.ExponentialLR(opt, 0.5))
    step = fl.pipeline(fl.amp("fp16", init_scale=8.0), halving)(toy_loss)
    state = fl.fit(step, toy(), [torch.tensor([x]) for x in (1.0, 3e38, 2.0)], hooks=())
    assert state.model.w.item() == -(1 + 2 * 0.5)


def test_a_snapshot_has_its_own_scheduler():
    halving = fl.torch_scheduler(lambda opt, run: lr_scheduler.ExponentialLR(opt, 0.5))
    step = fl.pipeline(halving)(toy_loss)
    state, _ = step(toy(), ONE)
    kept = fl.snapshot(state)
    step(state, ONE)
    kept, _ = step(kept, ONE)
    assert kept.model.w.item() == -1.5
    assert kept.slots["torch_scheduler"].optimizer is kept.optimizer


def test_a_factory_that_is_not_a_function_is_an_error_when_composing():
    with pytest.raises(TypeError, match=r"torch_scheduler\(lambda optimizer, run: ...\)"):
        fl.torch_scheduler("cosine")


def test_reduce_on_plateau_is_refused_with_advice():
    with pytest.raises(TypeError, match="ReduceLROnPlateau steps by a metric: use it in a hook"):
        fl.pipeline(fl.torch_scheduler(lambda opt, run: lr_scheduler.ReduceLROnPlateau(opt)))(
            toy_loss
        )(toy(), ONE)


def test_a_result_that_is_not_a_scheduler_is_an_error():
    with pytest.raises(TypeError, match=r"must make a torch.optim.lr_scheduler; it made None"):
        fl.pipeline(fl.torch_scheduler(lambda opt, run: None))(toy_loss)(toy(), ONE)


def test_a_factory_that_needs_the_length_of_the_run_suggests_fit():
    by_length = fl.torch_scheduler(
        lambda opt, run: lr_scheduler.LinearLR(opt, 1.0, 0.5, total_iters=2 * run.total_steps)
    )
    with pytest.raises(ValueError, match=r"call fit\(step, state, loaders"):
        fl.pipeline(by_length)(toy_loss)(toy(), ONE)


# --- schedulers that depend on the length of the run


BY_LENGTH = [
    lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, T_max=run.total_steps),
    lambda opt, run: lr_scheduler.CosineAnnealingLR(opt, T_max=run.epochs * run.steps_per_epoch),
    lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=run.total_steps),
    lambda opt, run: lr_scheduler.LambdaLR(opt, lambda i: 1 - i / run.total_steps),
]


@pytest.mark.parametrize("factory", BY_LENGTH)
@pytest.mark.parametrize("kept", ["as it is", "snapshot", "checkpoint"])
@pytest.mark.parametrize("lr", [1.0, torch.tensor(1.0)], ids=["number", "tensor"])
def test_a_run_of_another_length_is_refused_and_the_advice_makes_a_new_scheduler(
    factory, kept, lr, tmp_path
):
    def new():
        model = torch.nn.Linear(1, 1)
        rate = lr.clone() if isinstance(lr, torch.Tensor) else lr
        return fl.TrainState.create(
            model, torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9), seed=0
        )

    def fit(state, epochs, *hooks, **kwargs):
        return fl.fit(step, state, [torch.ones(1, 1)] * 2, epochs=epochs, hooks=hooks, **kwargs)

    def note(state):
        seen.append(float(state.optimizer.param_groups[0]["lr"]))
        return state

    step, seen = fl.pipeline(fl.torch_scheduler(factory))(lambda m, b: m(b).mean()), []
    state = fit(new(), 2)
    state = fl.snapshot(state) if kept == "snapshot" else state
    state = fl.restore(fl.save(state, tmp_path / "a"), new()) if kept == "checkpoint" else state
    with pytest.raises(
        ValueError, match=r"was made for a run of .*=(4|2), and this run has .*=(8|4)"
    ) as caught:
        fit(state, 4)
    state = caught.value.state
    assert (state.step, state.epoch) == (4, 2)
    assert 'fit(..., phase="second")' in str(caught.value)
    fit(state, 3, note, phase="second")
    again, rates = new(), []
    scheduler = factory(again.optimizer, fl.RunInfo(epochs=3, total_steps=6, steps_per_epoch=2))
    for _ in range(6):
        again.optimizer.step()
        scheduler.step()
        rates.append(float(again.optimizer.param_groups[0]["lr"]))
    assert seen == pytest.approx(rates, abs=1e-6)


def collect_rates():
    """Return a hook that collects the learning rate of each update, and its list."""
    seen = []

    def note(state):
        seen.append(round(state.optimizer.param_groups[0]["lr"], 3))
        return state

    return note, seen


def test_a_run_of_the_same_length_resumes_from_a_checkpoint(tmp_path):
    step = fl.pipeline(fl.torch_scheduler(BY_LENGTH[0]))(toy_loss)
    note, seen = collect_rates()
    pause = fl.when(lambda state: state.step == 1)(
        fl.once(lambda state: attrs.evolve(state, stop="pause"), name="pause")
    )
    state = fl.fit(step, toy(), [ONE] * 2, epochs=2, hooks=(note, pause))
    state = attrs.evolve(fl.restore(fl.save(state, tmp_path / "a"), toy()), stop=None)
    fl.fit(step, state, [ONE] * 2, epochs=2, hooks=(note,))
    assert seen == [0.854, 0.5, 0.146, 0.0]


@pytest.mark.parametrize(
    "factory",
    [
        lambda opt, run: lr_scheduler.StepLR(opt, 2, 0.5),
        lambda opt, run: lr_scheduler.StepLR(opt, run.steps_per_epoch, 0.5),
        lambda opt, run: print(run) or lr_scheduler.StepLR(opt, 2, 0.5),
    ],
    ids=["no length", "the length of an epoch", "printed"],
)
def test_a_scheduler_independent_of_the_total_continues_in_a_longer_run(factory):
    step = fl.pipeline(fl.torch_scheduler(factory))(toy_loss)
    state = fl.fit(step, toy(), [ONE] * 2, epochs=1, hooks=())
    state = fl.fit(step, state, [ONE] * 2, epochs=3, hooks=())
    assert state.model.w.item() == -(2 * 1 + 2 * 0.5 + 2 * 0.25)


def test_the_factory_is_given_a_run_info():
    runs = []

    def factory(opt, run):
        runs.append(run)
        return lr_scheduler.StepLR(opt, 1)

    fl.fit(fl.pipeline(fl.torch_scheduler(factory))(toy_loss), toy(), [ONE] * 2, epochs=2, hooks=())
    (run,) = runs
    plain = fl.RunInfo(epochs=2, total_steps=4, steps_per_epoch=2, batches_per_epoch=2)
    assert isinstance(run, fl.RunInfo)
    assert run == plain and plain == run and hash(run) == hash(plain)
    assert (repr(run), run._repr_html_()) == (repr(plain), plain._repr_html_())
    assert attrs.evolve(run, epochs=3).epochs == 3


def test_a_scheduler_past_its_own_end_is_an_error_with_advice():
    step = fl.pipeline(
        fl.torch_scheduler(lambda opt, run: lr_scheduler.OneCycleLR(opt, 1.0, total_steps=2))
    )(toy_loss)
    with pytest.raises(ValueError, match="Tried to step 3 times") as caught:
        fl.fit(step, toy(), [ONE] * 4, hooks=())
    assert any("begin a phase" in note for note in caught.value.__notes__)


def test_a_scheduler_of_another_optimizer_is_refused():
    other = toy().optimizer
    step = fl.pipeline(fl.torch_scheduler(lambda opt, run: lr_scheduler.StepLR(other, 1)))(toy_loss)
    with pytest.raises(
        ValueError,
        match=r"of another optimizer than the state's.* lambda opt, run: StepLR\(opt, ...\)",
    ):
        fl.fit(step, toy(), [ONE], hooks=())


class TimmScheduler:
    """Has the interface of timm's schedulers."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self, epoch, metric=None):
        raise AssertionError("must not be called")


def test_a_scheduler_of_another_library_is_refused_with_advice():
    step = fl.pipeline(fl.torch_scheduler(lambda opt, run: TimmScheduler(opt)))(toy_loss)
    with pytest.raises(
        TypeError,
        match=r"TimmScheduler, which is not one.* schedule\(lambda step, total_steps: ...\)",
    ):
        fl.fit(step, toy(), [ONE], hooks=())
