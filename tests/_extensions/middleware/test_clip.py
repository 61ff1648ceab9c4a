"""clip, clip_value, clip_adaptive and grad_norm: norms, limits and what is reported."""

import math

import pytest
import torch
from torch import nn
from toy_runs import assert_same_weights, fitted, of, of_timm

import fnloop as fl
from fnloop.testing import assert_same, small, spy, toy


def clipped(member, state, grad=2.0, **given):
    """Return the output of a middleware around a step with this gradient everywhere."""
    return member.gradient(spy(grad=grad, **given))(state, None)[1]


def norms(out):
    return {name: metric.compute() for name, metric in out.metrics.items()}


def two_parts():
    """Three parameters, of 9, 3 and 1 elements."""
    return of(nn.Sequential(nn.Linear(3, 3), nn.Linear(1, 1, bias=False)))


@pytest.mark.parametrize(("member", "grad", "expected", "reported"), [
    *[(fl.clip(1.0), g, c, abs(g)) for g, c in ((4, 1), (-4, -1), (0.5, 0.5), (0, 0))],
    (fl.clip(math.inf), math.inf, math.inf, math.inf),
    *[(fl.clip_value(1.5), g, c, None) for g, c in ((4, 1.5), (-4, -1.5), (1, 1))],
    *[(fl.clip_adaptive(0.5), g, c, None) for g, c in ((4, 1), (-4, -1), (0.5, 0.5))],
], ids=repr)  # fmt: skip
def test_a_gradient_is_brought_to_the_limit_and_the_norm_is_that_before_it(
    member, grad, expected, reported
):
    state = toy(w=2.0)
    out = clipped(member, state, grad)
    assert state.model.w.grad.item() == pytest.approx(expected, abs=1e-6)
    assert norms(out).get("grad_norm") == reported
    left = clipped(member, state, grad, skip="no")  # a skipped update is not clipped
    assert (state.model.w.grad.item(), norms(left)) == (grad, {})


@pytest.mark.parametrize("member", [fl.clip(9.0), fl.grad_norm()], ids=repr)
def test_the_norm_in_a_record_is_the_unweighted_mean_over_updates(member):
    """The norms are 3 for a batch of one item, and 1 for a batch of two."""
    state = fitted([torch.tensor([3.0]), torch.tensor([-1.0, -1.0])], member)
    assert state.history["train/grad_norm"] == (2.0,) and state.model.w.item() == -2.0


@pytest.mark.parametrize(("norm_type", "norm"), [(1.0, 8.0), (2.0, 4.0), (math.inf, 2.0)])
def test_a_parameter_without_elements_adds_nothing_to_the_norm(norm_type, norm):
    def make():
        return of(nn.ParameterList([torch.zeros(0, 2), torch.zeros(4)]))

    members = [fl.grad_norm(norm_type), fl.grad_norm(norm_type, by="module")]
    for member in (*members, fl.clip(math.inf, norm_type), fl.clip(1.0, norm_type)):
        assert [*norms(clipped(member, make())).values()] == [norm]
    for member in (fl.grad_norm(norm_type), fl.clip(1.0, norm_type)):
        step = fl.pipeline(member, fl.skip_nonfinite())(
            lambda model, x: 2 * x.mean() * sum(p.sum() for p in model)
        )
        _, out = step(fl.stack({"a": make(), "b": make()}), torch.ones(1))
        assert out.metrics["grad_norm"].compute() == {"a/grad_norm": norm, "b/grad_norm": norm}


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_gradient_without_a_finite_norm_becomes_nan_as_a_whole(bad, norm_type):
    state = of(nn.Linear(2, 1))

    def one_bad(state, batch):
        state, out = spy(grad=2.0)(state, batch)
        state.model.bias.grad.fill_(bad)
        return state, out

    _, out = fl.clip(1.0, norm_type).gradient(one_bad)(state, None)
    norm = norms(out)["grad_norm"]
    assert norm == math.inf or (math.isnan(bad) and math.isnan(norm))
    assert all(p.grad.isnan().all() for p in state.model.parameters())


def test_a_norm_that_overflows_does_not_pass_as_a_gradient_of_zero():
    """Each element is finite, but not their sum of squares. Torch would scale them to 0."""
    state = two_parts()
    assert norms(clipped(fl.clip(1.0), state, 1e30)) == {"grad_norm": math.inf}
    assert state.model[0].weight.grad.isnan().all()


@pytest.mark.parametrize(("member", "grads", "reported"), [
    (fl.clip(1.0, only="1.*"), [2.0, 2.0, 1.0], {"grad_norm": 2.0}),
    (fl.clip(3.0, only="0.weight", name="w"), [1.0, 2.0, 2.0], {"grad_norm/w": 6.0}),
    (fl.clip(99, only="0"), [2.0] * 3, {"grad_norm": math.sqrt(48)}),
    (fl.clip(99, only=["0.weight", "0.bias"]), [2.0] * 3, {"grad_norm": math.sqrt(48)}),
    (fl.clip(99, only=lambda n, p: n[0] == "0"), [2.0] * 3, {"grad_norm": math.sqrt(48)}),
], ids=repr)  # fmt: skip
def test_the_norm_and_the_scale_are_those_of_the_parameters_chosen(member, grads, reported):
    """The gradients are 2: the norm is 2 of the last weight, 6 of the first nine."""
    state = two_parts()
    assert norms(clipped(member, state)) == pytest.approx(reported)
    found = [p.grad.flatten()[0].item() for p in state.model.parameters()]
    assert found == pytest.approx(grads)


def test_a_module_of_the_model_is_a_selector():
    state = two_parts()
    assert norms(clipped(fl.clip(9.0, only=state.model[1]), state)) == {"grad_norm": 2.0}


def test_what_is_frozen_is_not_looked_for_and_what_is_unfrozen_is_found():
    state = fl.freeze(two_parts(), "1")
    step = fl.pipeline(fl.clip(9.0, only="1.*"))(lambda m, x: m[0](x).sum() + m[1].weight.sum())
    state, out = step(state, torch.ones(1, 3))
    assert norms(out) == {"grad_norm": 0.0}
    _, out = step(fl.unfreeze(state, "1", lr=0.1), torch.ones(1, 3))
    assert norms(out) == {"grad_norm": 1.0}


def test_in_turns_each_step_clips_its_own():
    model = nn.ParameterDict({"a": torch.zeros(()), "b": torch.zeros(())})
    state = fl.TrainState.create(model, {k: torch.optim.SGD([model[k]], lr=1.0) for k in "ab"})
    loss_fn = lambda model, x: ((model["a"] + model["b"]) * x).mean()
    member, data = fl.clip(1.0, only=("a", "b")), [torch.tensor([4.0])] * 2
    steps = {name: fl.pipeline(member)(loss_fn) for name in "ab"}  # each turn updates one
    state = fl.fit(fl.alternate(steps), state, data, hooks=())
    assert model["a"].item() == model["b"].item() == pytest.approx(-2.0)
    wrong = {**steps, "a": fl.pipeline(fl.clip(1.0, only="b"))(loss_fn)}
    with pytest.raises(ValueError, match="that no optimizer of this step updates: b"):
        fl.fit(fl.alternate(wrong), state, data, epochs=2, hooks=())


def test_parameters_that_overlap_are_refused_before_the_first_update():
    both = fl.clip(1.0, only="0.*", name="a"), fl.clip(1.0, only="*.weight", name="b")
    step, x = fl.pipeline(*both)(lambda model, x: 1 / 0), torch.ones(1, 3)
    match = r"clip\(1.0, only='0.\*', name='a'\) and .*name='b'\) both clip 0.weight"
    for run in (step, lambda state, x: fl.fit(step, state, [x], hooks=())):
        with pytest.raises(ValueError, match=match):
            run(two_parts(), x)


@pytest.mark.parametrize("factory", [fl.clip, fl.clip_adaptive])
def test_a_selector_for_nothing_is_refused_before_the_first_update(factory):
    with pytest.raises(ValueError, match='nothing in the Sequential has a name like "2'):
        member = factory(1.0, only="2.*")
        fitted([torch.ones(1, 3)], member, loss_fn=lambda *_: 1 / 0, state=two_parts())


def test_it_equals_timm_bit_for_bit():
    torch.manual_seed(0)
    state = of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 5)))
    x, hand = torch.randn(2, 3, 4, 4), fl.snapshot(state)
    loss_fn = lambda model, batch: model(batch).square().mean()
    fitted([x], fl.clip_adaptive(0.02), loss_fn=loss_fn, state=state)
    loss_fn(hand.model, x).backward()
    before = [p.grad.clone() for p in hand.model.parameters()]
    clip = of_timm("utils/agc.py", "adaptive_clip_grad")
    clip(hand.model.parameters(), clip_factor=0.02)
    assert not all(map(torch.equal, before, (p.grad for p in hand.model.parameters())))
    hand.optimizer.step()
    assert_same_weights(state, hand)


def test_each_row_is_a_unit_and_a_bias_is_one():
    model = nn.Linear(2, 2)
    model.weight.data = torch.tensor([[3.0, 4.0], [0.3, 0.4]])  # norms 5 and 0.5
    model.bias.data = torch.tensor([6.0, 8.0])  # norm 10
    clipped(fl.clip_adaptive(0.1), of(model), 1.0)  # norms of sqrt(2)
    assert model.weight.grad.norm(dim=1).tolist() == pytest.approx([0.5, 0.05])
    assert model.bias.grad.norm().item() == pytest.approx(1.0)
    clipped(fl.clip_adaptive(0.1, only="weight"), of(model), 9.0)
    assert model.bias.grad.tolist() == [9.0, 9.0] and model.weight.grad.norm() < 9
    assert fl.clip_adaptive(math.inf).gradient is None
    state = toy(w=0.0)
    clipped(fl.clip_adaptive(0.5), state, 1.0)  # a weight counts as a thousandth at least
    assert state.model.w.grad.item() == pytest.approx(5e-4)


def test_a_unit_whose_norm_is_not_finite_becomes_nan_and_others_do_not():
    model = nn.Linear(2, 2, bias=False)

    def one_bad(state, batch):
        state, out = spy(grad=1.0)(state, batch)
        model.weight.grad[0, 0] = math.inf
        return state, out

    fl.clip_adaptive(0.1).gradient(one_bad)(of(model), None)
    assert model.weight.grad[0].isnan().all() and model.weight.grad[1].isfinite().all()


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("accumulate", [(), (fl.accumulate(3),)])
def test_it_reports_what_clip_would(norm_type, accumulate):
    problem = small()

    def run(*members):
        return fitted(problem.batches, *members, loss_fn=problem.loss_fn, state=problem.state())

    norm, other = fl.grad_norm(norm_type), fl.clip(math.inf, norm_type)
    assert_same(run(*accumulate, norm), run(*accumulate, other))
    assert_same(run(norm, *accumulate), run(other, *accumulate))


def test_by_module_it_reports_the_norm_of_each_module_with_parameters_of_its_own():
    model = nn.Sequential(nn.Linear(2, 1), nn.Sequential(nn.Tanh(), nn.Linear(1, 1)))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    extra = nn.Parameter(torch.zeros(4))
    state = fl.TrainState.create(model, torch.optim.SGD([*model.parameters(), extra], lr=1.0))
    root, two = {"grad_norm/Sequential": 2.0, "grad_norm/others": 4.0}, 2 * math.sqrt(2)
    expected = {"grad_norm/0": 2 * math.sqrt(3), "grad_norm/1.1": two, **root}
    assert norms(clipped(fl.grad_norm(by="module"), state)) == pytest.approx(expected)


def test_it_is_reported_beside_clip_and_beside_the_norm_of_all():
    state = fitted([4], fl.clip(1.0), fl.grad_norm(by="module"))
    assert state.history.latest("train/grad_norm") == 4.0
    assert state.history.latest("train/grad_norm/Toy") == pytest.approx(1.0)
    fl.pipeline(fl.grad_norm(), fl.grad_norm(by="module"))
    fl.pipeline(fl.grad_norm(), fl.clip(1.0, only="w", name="w"))
