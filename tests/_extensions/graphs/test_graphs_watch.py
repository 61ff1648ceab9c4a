"""A change of what graphs assume makes new graphs."""

import attrs
import pytest
import torch
from graph_problems import capturable_adam, compared, done, fused_sgd, net
from sample_middleware import average
from torch import nn
from toy_runs import fitted, of, xs

import fnloop as fl
from fnloop import schedules
from fnloop._extensions.graphs.guards import GuardSet
from fnloop.testing import Problem, Toy, toy, toy_loss

GRAPH = fl.cuda_graph(warmup=1)


def changing(change, at=4):
    """Return a hook that changes a state after some updates."""
    return fl.when(lambda state: state.step == at)(change)


def watched(recorders, change, *members, **settings):
    """Train a net for some updates, change something, train on; and the same without graphs."""
    members, problem = (*members, fl.clip(float("inf"))), net(**settings)
    compared(problem, *members, loaders=[problem.batches[0]] * 8, hooks=(changing(change),))
    return done(recorders)


def momentum(state):
    state.optimizer.param_groups[0]["momentum"] = 0.5
    return state


def freeze(state):
    state.model[0].weight.requires_grad_(False)
    return state


def evaluation_mode(state):
    state.model[1].eval()
    return state


def other_memory(state):
    state.model[0].weight.data = state.model[0].weight.data * 2
    return state


def other_memory_of_the_rate(state):
    rate = state.optimizer.param_groups[0]["lr"]
    rate.data = rate.data * 2
    return state


def other_optimizer_state(state):
    state.optimizer.load_state_dict(state.optimizer.state_dict())
    for values in state.optimizer.state.values():
        values["momentum_buffer"] = values["momentum_buffer"] * 2
    return state


def replaced_parameter(state):
    layer, optimizer = state.model[0], state.optimizer
    old, layer.weight = layer.weight, nn.Parameter(layer.weight.detach() * 2)
    params = optimizer.param_groups[0]["params"]
    params[:] = [layer.weight if p is old else p for p in params]
    held = {layer.weight if p is old else p: values for p, values in optimizer.state.items()}
    optimizer.state.clear()
    optimizer.state.update(held)  # in the same order
    return state


def other_tensors_in_a_slot(state):
    state.slots["average"][:] = [torch.zeros_like(t) for t in state.slots["average"]]
    return state


def another_slot(state):
    tensors = [torch.zeros_like(t) for t in state.slots["average"]]
    return attrs.evolve(state, slots={**state.slots, "average": tensors})


def rate(state):
    state.optimizer.param_groups[0]["lr"] = 0.5
    return state


def test_a_learning_rate_that_a_hook_sets_is_filled_in(recorders):
    assert watched(recorders, rate).count("run") == 1


@pytest.mark.parametrize("change", [
    momentum, freeze, evaluation_mode, other_memory, other_memory_of_the_rate, replaced_parameter,
    other_optimizer_state, other_tensors_in_a_slot, another_slot,
])  # fmt: skip
def test_a_change_between_two_updates_makes_new_graphs(change, recorders):
    log = [entry for entry in watched(recorders, change, average(0.5)) if "replay" not in entry]
    assert log == ["run", "record 0"] * 2


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(4, 1)
        self.beta = 1.0

    def forward(self, x):
        return super().forward(x) * self.beta


def test_a_number_of_a_module_that_a_hook_changes_makes_a_new_graph(recorders):
    def anneal(state):
        state.model.beta = 0.5
        return state

    problem = Problem(Scaled, lambda m, x: m(x).square().mean(), [torch.ones(2, 4)] * 9, fused_sgd)
    compared(problem, hooks=(changing(anneal),))
    assert done(recorders).count("run") == 2


def test_a_slot_that_is_replaced_before_every_update_causes_a_warning(recorders, caplog):
    def renewed(step):
        fresh = lambda state: attrs.evolve(state, slots={"average": [torch.zeros(())]})
        return lambda state, batch: step(fresh(state), batch)

    fitted([1] * 450, average(0.5), fl.Middleware("renewed", step=renewed), GRAPH)
    assert len(caplog.messages) == 1
    assert "because a slot that the update reads keeps changing" in caplog.text


def test_a_slot_of_the_step_ring_may_change_with_every_update(recorders):
    def counter(step):
        def counted(state, batch):
            state, out = step(state, batch)
            slots = {**state.slots, "counter": state.slots["counter"] + 1}
            return attrs.evolve(state, slots=slots), out

        return counted

    member = fl.Middleware("counter", step=counter, init=lambda state: 0)
    state = fitted([1, 2, 3, 4], member, GRAPH)
    assert (state.slots["counter"], state.model.w.item()) == (4, -10.0)
    assert done(recorders).count("run") == 1


def test_another_state_has_graphs_of_its_own(recorders):
    step = fl.pipeline(GRAPH)(toy_loss)
    one, two = fl.snapshot(toy()), toy()
    one = fl.fit(step, one, xs(1, 2, 3), hooks=())
    two = fl.fit(step, two, xs(10, 20, 30), hooks=())
    assert (one.model.w.item(), two.model.w.item()) == (-6.0, -60.0)


def test_parameters_added_between_two_runs_are_trained(recorders):
    problem = net()

    def run(*members):
        step = fl.pipeline(*members)(problem.loss_fn)
        state = fl.fit(step, problem.state(), [problem.batches[0]] * 3, hooks=())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state.model.append(nn.Linear(1, 1).double())
        state.optimizer.add_param_group({"params": state.model[-1].parameters()})
        return fl.fit(step, state, [problem.batches[0]] * 3, epochs=2, hooks=())

    for mine, theirs in zip(run(GRAPH).model.parameters(), run().model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_a_second_run_reuses_the_graphs_of_the_first(recorders):
    step = fl.pipeline(GRAPH)(toy_loss)
    state = fl.fit(step, toy(), xs(1, 2), hooks=())
    fl.fit(step, state, xs(1, 2), epochs=2, hooks=())
    assert done(recorders) == ["run", "record 0", *["replay 0"] * 3]


def test_updates_that_are_never_captured_cause_one_warning(recorders, caplog):
    fitted([torch.ones(n) for n in range(1, 220)], fl.cuda_graph())
    assert len(caplog.messages) == 1
    assert "because the shapes of the batches keeps changing" in caplog.text
    caplog.clear()
    fading = fl.schedule(schedules.linear(), field="weight_decay")
    fitted([1] * 120, fl.cuda_graph(), fading, state=of(Toy(), weight_decay=0.1))
    assert "because a setting of the optimizer (weight_decay) keeps changing" in caplog.text


def test_eager_updates_count_from_the_last_replay(recorders, caplog):
    sizes = [*range(1, 61), 60, 60, *range(61, 121)]
    fitted([*map(torch.ones, sizes)], GRAPH)
    assert done(recorders).count("run") == 120
    assert not caplog.messages


def thaw(state):
    return fl.unfreeze(state, "0.weight", lr=0.5)


@pytest.mark.parametrize("optimizer", [fused_sgd, capturable_adam])
@pytest.mark.parametrize("change", [lambda state: fl.freeze(state, "0.weight"), thaw])
def test_what_is_trained_may_change_between_two_updates(recorders, change, optimizer):
    log = watched(recorders, change, optimizer=optimizer)
    assert log.count("run") == 2 and any(entry.startswith("replay") for entry in log)


def test_a_number_that_a_module_deletes_makes_a_new_graph():
    state = toy()
    state.model.first = 1
    guards = GuardSet(state)
    del state.model.first
    assert guards.violated(state) == "a number of a module"
    guards.snapshot()  # as after an eager update
    assert guards.violated(state) is None
