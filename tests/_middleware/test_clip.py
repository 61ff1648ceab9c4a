"""clip and clip_value: norms, limits and what is reported."""

import math

import pytest
import torch

import fnloop as fl
from fnloop.testing import spy, toy, toy_loss


@pytest.mark.parametrize(("grad", "clipped"), [(4.0, 1.0), (-4.0, -1.0), (0.5, 0.5), (0.0, 0.0)])
def test_clip_scales_to_the_limit_and_reports_the_norm_before_it(grad, clipped):
    state, out = fl.clip(1.0).gradient(spy(grad=grad))(toy(), None)
    assert state.model.w.grad.item() == pytest.approx(clipped, abs=1e-6)
    assert out.metrics["grad_norm"].compute() == abs(grad)


def test_the_norm_is_over_all_parameters_together():
    model = torch.nn.Linear(2, 1)  # three parameters, each with gradient 2: a norm of 2 sqrt(3)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))
    _, out = fl.clip(1.0).gradient(spy(grad=2.0))(state, None)
    assert out.metrics["grad_norm"].compute() == pytest.approx(2 * math.sqrt(3))
    assert model.weight.grad.tolist() == [[pytest.approx(1 / math.sqrt(3), rel=1e-5)] * 2]
    _, out = fl.clip(1.0, norm_type=math.inf).gradient(spy(grad=2.0))(state, None)
    assert out.metrics["grad_norm"].compute() == 2.0


def test_clip_inf_measures_the_norm_and_changes_nothing():
    state, out = fl.clip(math.inf).gradient(spy(grad=math.inf))(toy(), None)
    assert (state.model.w.grad.item(), out.metrics["grad_norm"].compute()) == (math.inf, math.inf)


def test_the_norm_is_in_the_history():
    state = fl.fit(
        fl.pipeline(fl.clip(1.0))(toy_loss),
        toy(),
        [torch.tensor([3.0]), torch.tensor([5.0])],
        hooks=(),
    )
    assert state.history["train/grad_norm"] == (4.0,)


@pytest.mark.parametrize(("grad", "clamped"), [(4.0, 1.5), (-4.0, -1.5), (1.0, 1.0)])
def test_clip_value_clamps_each_element(grad, clamped):
    state, _ = fl.clip_value(1.5).gradient(spy(grad=grad))(toy(), None)
    assert state.model.w.grad.item() == clamped


def test_a_skipped_update_is_not_clipped():
    state, out = fl.clip(1.0).gradient(spy(grad=4.0, skip="no"))(toy(), None)
    assert (state.model.w.grad.item(), "grad_norm" in out.metrics) == (4.0, False)


@pytest.mark.parametrize("factory", [fl.clip, fl.clip_value])
@pytest.mark.parametrize(
    ("limit", "error"),
    [(0.0, ValueError), (-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)],
)
def test_a_limit_must_be_a_number_above_zero(factory, limit, error):
    with pytest.raises(error, match=f"{factory.__name__} expects"):
        factory(limit)


def test_the_norm_in_a_record_is_the_unweighted_mean_over_updates():
    """The norms are 3 for a batch of one item and 1 for a batch of two."""
    batches = [torch.tensor([3.0]), torch.tensor([1.0, 1.0])]
    state = fl.fit(fl.pipeline(fl.clip(9.0))(toy_loss), toy(), batches, hooks=())
    assert state.history["train/grad_norm"] == (2.0,)


# --- a norm that is not finite


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_without_a_finite_norm_becomes_nan_as_a_whole(bad, norm_type):
    model = torch.nn.Linear(2, 1)
    state = fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    def one_bad(state, batch):
        state, out = spy(grad=2.0)(state, batch)
        model.bias.grad.fill_(bad)
        return state, out

    _, out = fl.clip(1.0, norm_type).gradient(one_bad)(state, None)
    norm = out.metrics["grad_norm"].compute()
    assert norm == math.inf or (math.isnan(bad) and math.isnan(norm))
    assert all(p.grad.isnan().all() for p in model.parameters())


def test_a_norm_that_overflows_does_not_pass_as_a_gradient_of_zero():
    """Each element is finite, but not their sum of squares. Torch would scale them to 0."""
    state, out = fl.clip(1.0).gradient(spy(grad=1e30))(two_parts(), None)
    assert out.metrics["grad_norm"].compute() == math.inf
    assert state.model[0].weight.grad.isnan().all()


# --- some parameters


def two_parts():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(1, 1, bias=False))
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))


def grads(state):
    return [p.grad.flatten()[0].item() for p in state.model.parameters()]


def test_the_norm_and_the_scale_are_those_of_the_parameters_chosen():
    """The gradients are 2: the norm is 2 of the last weight, 6 of the first nine."""
    state, out = fl.clip(1.0, only="1.*").gradient(spy(grad=2.0))(two_parts(), None)
    assert grads(state) == [2.0, 2.0, pytest.approx(1.0)]
    assert {name: m.compute() for name, m in out.metrics.items()} == {"grad_norm": 2.0}
    state, out = fl.clip(3.0, only="0.weight", name="w").gradient(spy(grad=2.0))(two_parts(), None)
    assert grads(state) == [pytest.approx(1.0), 2.0, 2.0]
    assert {name: m.compute() for name, m in out.metrics.items()} == {"grad_norm/w": 6.0}


@pytest.mark.parametrize(
    "only",
    ["0", ["0.weight", "0.bias"], lambda name, p: name.startswith("0.")],
    ids=["module", "list", "function"],
)
def test_selectors_are_those_of_freeze(only):
    _, out = fl.clip(9.0, only=only).gradient(spy(grad=1.0))(two_parts(), None)
    assert out.metrics["grad_norm"].compute() == pytest.approx(math.sqrt(12))


def test_a_module_of_the_model_is_a_selector():
    state = two_parts()
    _, out = fl.clip(9.0, only=state.model[1]).gradient(spy(grad=1.0))(state, None)
    assert out.metrics["grad_norm"].compute() == 1.0


def test_two_parts_are_clipped_each_by_itself_as_by_hand():
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))

    def loss_fn(model, batch):
        return model[0](batch).square().mean() * 50 + model[1].weight.square().mean()

    torch.manual_seed(0)
    state = two_parts()
    hand = fl.snapshot(state)
    first, second = fl.clip(0.5, only="0.*", name="first"), fl.clip(0.1, only="1.*", name="second")
    state = fl.fit(fl.pipeline(first, second)(loss_fn), state, [x], hooks=())
    loss_fn(hand.model, x).backward()
    norms = [
        torch.nn.utils.clip_grad_norm_(part.parameters(), limit).item()
        for part, limit in zip(hand.model, (0.5, 0.1), strict=True)
    ]
    hand.optimizer.step()
    for mine, theirs in zip(state.model.parameters(), hand.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    history = state.history.latest
    assert [history("train/grad_norm/first"), history("train/grad_norm/second")] == norms


def test_what_is_frozen_is_not_looked_for_and_what_is_unfrozen_is_found():
    state = fl.freeze(two_parts(), "1")
    step = fl.pipeline(fl.clip(9.0, only="1.*"))(lambda m, x: m[0](x).sum() + m[1].weight.sum())
    state, out = step(state, torch.ones(1, 3))
    assert out.metrics["grad_norm"].compute() == 0.0
    _, out = step(fl.unfreeze(state, "1", lr=0.1), torch.ones(1, 3))
    assert out.metrics["grad_norm"].compute() == 1.0


def test_in_turns_each_step_clips_its_own():
    model = torch.nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    optimizers = {k: torch.optim.SGD([model[k]], lr=1.0) for k in ("a", "b")}

    def loss_fn(model, x):
        return ((model["a"] + model["b"]) * x).mean()

    clipped = fl.clip(1.0, only=("a", "b"))  # of which each turn updates one
    steps = {"a": fl.pipeline(clipped)(loss_fn), "b": fl.pipeline(clipped)(loss_fn)}
    state = fl.TrainState.create(model, optimizers)
    state = fl.fit(fl.alternate(steps), state, [torch.tensor([4.0])] * 2, hooks=())
    assert model["a"].item() == model["b"].item() == pytest.approx(-2.0)
    wrong = {**steps, "a": fl.pipeline(fl.clip(1.0, only="b"))(loss_fn)}
    with pytest.raises(ValueError, match="that no optimizer of this step updates: b"):
        fl.fit(fl.alternate(wrong), state, [torch.tensor([4.0])] * 4, epochs=2, hooks=())


# --- what is refused


def test_parameters_that_overlap_are_refused_before_the_first_update():
    both = fl.clip(1.0, only="0.*", name="a"), fl.clip(1.0, only="*.weight", name="b")
    step, state = fl.pipeline(*both)(lambda model, x: 1 / 0), two_parts()
    match = r"clip\(1.0, only='0.\*', name='a'\) and .*name='b'\) both clip 0.weight"
    for run in (step, lambda state, x: fl.fit(step, state, [x], hooks=())):
        with pytest.raises(ValueError, match=match):
            run(state, torch.ones(1, 3))


@pytest.mark.parametrize("more", [fl.clip(2.0), fl.clip(2.0, name="b")])
def test_two_are_refused_when_composing_if_one_is_for_all_parameters(more):
    with pytest.raises(ValueError, match=r"clip\(1.0\) .*(clips all parameters|one name)"):
        fl.pipeline(fl.clip(1.0), more)
    with pytest.raises(ValueError, match="clips all parameters, those of"):
        fl.pipeline(fl.clip(1.0, only="0", name="a"), more)


@pytest.mark.parametrize("factory", [fl.clip, fl.clip_adaptive])
@pytest.mark.parametrize("only", [3, (), "", torch.nn.Linear, ["0", 3], lambda name: True])
def test_what_is_not_a_selector_is_refused_at_once(factory, only):
    with pytest.raises(TypeError, match=f"{factory.__name__} expects only as"):
        factory(1.0, only=only)


@pytest.mark.parametrize("factory", [fl.clip, fl.clip_adaptive])
def test_a_selector_for_nothing_is_refused_before_the_first_update(factory):
    step = fl.pipeline(factory(1.0, only="2.*"))(lambda model, x: 1 / 0)
    with pytest.raises(ValueError, match='nothing in the Sequential has a name like "2'):
        fl.fit(step, two_parts(), [torch.ones(1, 3)], hooks=())


@pytest.mark.parametrize(("name", "error"), [("", ValueError), ("a/b", ValueError), (3, TypeError)])
def test_a_name_is_a_part_of_a_name_of_a_metric(name, error):
    with pytest.raises(error, match="clip expects name"):
        fl.clip(1.0, name=name)
