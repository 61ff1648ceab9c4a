"""A step of one's own, such as that of a GAN with two optimizers."""

import pickle

import attrs
import pytest
import torch
from sample_middleware import counted
from torch import nn
from torch.nn import functional

import fnloop as fl
from fnloop import schedules
from fnloop.testing import assert_same, toy, toy_loss


def descend(state, batch):
    """What a plain step does, by hand."""
    loss, aux = toy_loss(state.model, batch)
    loss.backward()
    state.optimizer.step()
    return fl.Output(loss, weight=len(batch), aux=aux, metrics={"largest": fl.Max(batch.max())})


def batches(*values):
    return [torch.tensor([float(v)] * (i + 1)) for i, v in enumerate(values)]


def test_a_run_counts_records_and_evaluates_it_as_any_other_step():
    loaders = {"train": batches(1, 2, 3), "valid": batches(5)}
    mine = fl.fit(fl.raw(descend, evaluate=toy_loss), toy(), loaders, epochs=2, hooks=())
    metric = fl.metric(largest=lambda aux, batch: fl.Max(batch.max()), on="training")
    theirs = fl.fit(fl.pipeline(metric)(toy_loss), toy(), loaders, epochs=2, hooks=())
    assert_same(mine, theirs)
    assert (mine.step, mine.model.w.item()) == (6, -12.0)
    assert mine.history["train/largest"] == (3.0, 3.0)


def test_a_bare_call_advances_the_state_and_clears_gradients():
    state = toy()
    new, out = fl.raw(descend)(state, torch.tensor([2.0]))
    assert (new.step, new.batch, new.model.w.item(), new.model.w.grad) == (1, 1, -2.0, None)
    assert not out.loss.requires_grad
    with pytest.raises(fl.StaleStateError):
        fl.raw(descend)(state, torch.tensor([2.0]))


def test_gradients_do_not_leak_from_call_to_call():
    """They would not be in a checkpoint."""
    state = toy()
    state.model.w.grad = torch.tensor(7.0)
    state, _ = fl.raw(descend)(state, torch.tensor([2.0]))
    assert state.model.w.item() == -2.0


def test_a_skipped_update_is_counted_as_one():
    def sometimes(state, batch):
        if batch.max() == 2:
            return fl.Output(torch.tensor(0.0), weight=1, skip="no")
        return descend(state, batch)

    state = fl.fit(fl.raw(sometimes), toy(), batches(1, 2, 3), hooks=())
    assert (state.step, state.skipped, state.batch, state.model.w.item()) == (2, 1, 0, -4.0)


def test_middleware_of_the_step_ring_acts_around_it():
    calls = []
    pipe = fl.pipeline(fl.schedule(schedules.linear()), counted(calls))
    double = fl.derive(double=lambda numbers: 2 * numbers["loss"])
    mean = fl.metric(mean=lambda aux, batch: aux["output"].mean(), on="evaluation")
    step = fl.pipeline(*pipe.middleware, double, mean)(fl.raw(descend, evaluate=toy_loss))
    loaders = {"train": batches(1, 1, 1, 1), "valid": batches(1)}
    state = fl.fit(step, toy(), loaders, hooks=())
    assert state.model.w.item() == -2.5  # 1 + 3/4 + 2/4 + 1/4
    assert calls == [0, 1, 2, 3]
    assert state.history["valid/mean"] == (-2.5,)
    assert state.history["valid/double"] == (-5.0,)


@pytest.mark.parametrize(
    ("member", "message"),
    [
        (fl.clip(1.0), r"clip\(1.0\) acts in the gradient ring, but descend does its own"),
        (fl.accumulate(2), r"accumulate\(2\) acts in the gradient ring"),
        (fl.amp("bf16"), "acts in the forward ring"),
        (fl.compiled(), "replaces the loss function"),
        (fl.metric(mean=lambda aux, batch: 0), 'on="evaluation"'),
        (fl.tbptt(2), "replaces the loss function"),
        (fl.cuda_graph(), "acts in the device ring"),
        (fl.throughput(), "acts in the loss ring"),
    ],
    ids=repr,
)
def test_middleware_that_it_would_ignore_is_refused(member, message):
    with pytest.raises(ValueError, match=message):
        fl.pipeline(member)(fl.raw(descend))


def test_a_step_is_not_a_loss_function():
    with pytest.raises(TypeError, match="is a step already"):
        fl.pipeline(fl.clip(1.0))(fl.pipeline()(toy_loss))


def test_a_loader_cannot_be_evaluated_without_a_loss_function():
    step, loaders = fl.raw(descend), {"train": batches(1), "valid": batches(1)}
    with pytest.raises(ValueError, match=r"cannot evaluate a loader: write raw\(descend, evalu"):
        fl.fit(step, toy(), loaders, hooks=())
    with pytest.raises(ValueError, match="cannot evaluate a loader"):
        fl.evaluate(step, toy(), loaders["valid"])
    assert fl.fit(step, toy(), loaders, evaluate_every=None, hooks=()).step == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fl.raw(toy_loss(toy().model, torch.ones(1))), "function .state, batch. -> Output"),
        (lambda: fl.raw(nn.Linear(1, 1)), "function .state, batch. -> Output"),
        (lambda: fl.raw(lambda state: None), "function .state, batch. -> Output"),
        (lambda: fl.raw(descend, evaluate=3), "a loss function"),
    ],
)
def test_what_is_not_such_a_function_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    "reply", [None, (1, 2), torch.ones(()), fl.Output(torch.ones(2), weight=1)], ids=type
)
def test_another_reply_is_refused(reply):
    with pytest.raises(TypeError, match=r"<lambda> must return Output\(loss, weight=items\)"):
        fl.raw(lambda state, batch: reply)(toy(), torch.ones(1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weight": "1"}, r"Output\(loss, weight=items\).*; got weight='1'"),
        ({"weight": -1}, "got weight=-1"),
        ({"weight": torch.ones(2)}, "got weight=tensor"),
        ({"metrics": {"a": 1.0}}, r"metrics such as {'a': Mean\(value, items\)}; got 1.0"),
        ({"skip": False}, 'skip="why", or None for an update that was made; got False'),
    ],
)
def test_a_wrong_part_of_the_output_is_named(settings, message):
    out = fl.Output(**{"loss": torch.ones(()), "weight": 1, **settings})
    with pytest.raises(TypeError, match="<lambda> must return .*" + message):
        fl.raw(lambda state, batch: out)(toy(), torch.ones(1))


def test_a_failure_leaves_no_state_to_continue_from():
    def fails(state, batch):
        descend(state, batch)
        raise RuntimeError("after the update")

    state = toy()
    with pytest.raises(RuntimeError, match="after the update") as caught:
        fl.fit(fl.raw(fails), state, batches(1), hooks=())
    assert "while in fails" in "".join(caught.value.__notes__)
    with pytest.raises(fl.StaleStateError, match="failed half-way"):
        fl.evaluate(fl.pipeline()(toy_loss), state, batches(1))


def test_a_step_inside_is_an_error_that_says_what_to_call():
    step = fl.pipeline()(toy_loss)

    def calls_a_step(state, batch):
        return step(state, batch)[1]

    with pytest.raises(fl.StaleStateError) as caught:
        fl.fit(fl.raw(calls_a_step), toy(), batches(1), hooks=())
    said = "calls_a_step makes the update itself: it calls the loss function, backward and the"
    assert any(note.startswith(said) for note in caught.value.__notes__)


def test_several_processes_are_refused():
    state = toy()
    several = attrs.evolve(state, backend=attrs.evolve(state.backend, world_size=2))
    with pytest.raises(NotImplementedError, match="one process only"):
        fl.raw(descend).init_slots(several)


def test_its_repr_is_what_was_typed_and_it_can_be_pickled():
    step = fl.pipeline(fl.schedule(schedules.linear()))(fl.raw(descend, evaluate=toy_loss))
    shown = "pipeline(schedule(linear()))(raw(descend, evaluate=toy_loss))"
    assert repr(step) == repr(pickle.loads(pickle.dumps(step))) == shown
    assert repr(fl.raw(descend)) == "raw(descend)"


def test_it_shows_its_function_and_no_ring_that_it_does_not_have():
    assert str(fl.raw(descend)) == "descend(state, batch)"
    step = fl.pipeline(fl.schedule(schedules.linear()))(fl.raw(descend, evaluate=toy_loss))
    assert str(step).splitlines() == [
        "┌ step      schedule(linear())",
        "│ descend(state, batch); in evaluation: toy_loss(model, batch)",
    ]
    assert "backward" not in step._repr_html_()


# --- PyTorch's examples/dcgan, with small nets: two optimizers in one function


def new_gan():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
            "d": nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
        }
    )


def bce(output, label):
    target = torch.full_like(output, label)
    return functional.binary_cross_entropy_with_logits(output, target)


def gan_update(g, d, optimizer_g, optimizer_d, real):
    """The body of the loop of dcgan's main.py."""
    d.zero_grad()
    error_real = bce(d(real), 1.0)
    error_real.backward()
    fake = g(torch.randn(len(real), 3))
    error_fake = bce(d(fake.detach()), 0.0)
    error_fake.backward()
    optimizer_d.step()
    g.zero_grad()
    error_g = bce(d(fake), 1.0)
    error_g.backward()
    optimizer_g.step()
    return error_real.detach() + error_fake.detach(), error_g.detach()


@pytest.mark.parametrize("stopped_after", [None, 1, 3, 4])
def test_a_gan_equals_the_loop_by_hand_also_when_it_is_resumed(stopped_after, tmp_path):
    from fnloop._core.rng import COMPUTE, fold_in

    generator = torch.Generator().manual_seed(5)
    reals = [torch.randn(n, 4, generator=generator) for n in (5, 5, 3)]

    def new_run():
        """The optimizer of the generator is in the state; that of the other has no state."""
        gan = new_gan()
        optimizer_d = torch.optim.SGD(gan["d"].parameters(), lr=0.1)
        optimizer_g = torch.optim.Adam(gan["g"].parameters(), lr=2e-3, betas=(0.5, 0.999))

        def update(state, real):
            g, d = state.model["g"], state.model["d"]
            error_d, error_g = gan_update(g, d, state.optimizer, optimizer_d, real)
            n = len(real)
            return fl.Output(error_g, weight=n, metrics={"d": fl.Mean(error_d * n, n)})

        return fl.raw(update), fl.TrainState.create(gan, optimizer_g, seed=7)

    step, state = new_run()
    calls = []

    def pause(state):
        calls.append(state.step)
        return attrs.evolve(state, stop="paused") if len(calls) == stopped_after else state

    state = fl.fit(step, state, reals, epochs=2, hooks=(pause,))
    if state.stop:
        fl.save(state, tmp_path / "paused")
        step, state = new_run()
        state = attrs.evolve(fl.restore(tmp_path / "paused", state), stop=None)
        state = fl.fit(step, state, reals, epochs=2, hooks=())

    gan = new_gan()
    optimizer_d = torch.optim.SGD(gan["d"].parameters(), lr=0.1)
    optimizer_g = torch.optim.Adam(gan["g"].parameters(), lr=2e-3, betas=(0.5, 0.999))
    errors = []
    for epoch in range(2):
        total_d = total_g = 0.0
        for i, real in enumerate(reals):
            torch.manual_seed(fold_in(7, COMPUTE, epoch, i))
            error_d, error_g = gan_update(gan["g"], gan["d"], optimizer_g, optimizer_d, real)
            total_d += error_d.item() * len(real)
            total_g += error_g.item() * len(real)
        errors.append((total_d / 13, total_g / 13))
    for name, value in gan.state_dict().items():
        assert torch.equal(state.model.state_dict()[name], value), name
    whole = [record.metrics for record in state.history if not record.closing]
    assert [m["train/d"] for m in whole] == pytest.approx([d for d, _ in errors], rel=1e-6)
    assert [m["train/loss"] for m in whole] == pytest.approx([g for _, g in errors], rel=1e-12)


def test_a_pipeline_without_a_loss_function_is_refused():
    with pytest.raises(TypeError, match=r"raw expects a function .* got pipeline"):
        fl.raw(fl.pipeline())
