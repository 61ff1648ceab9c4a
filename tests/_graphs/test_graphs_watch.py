"""A change of what graphs assume makes new graphs."""

import attrs
import pytest
import torch
from graph_problems import capturable_adam, done, fused_sgd, net, ones
from sample_middleware import average
from torch import nn

import fnloop as fl
from fnloop import schedules
from fnloop._graphs.guards import GuardSet
from fnloop.testing import assert_same, toy, toy_loss


def stopping(recorders, change, batches=4, **kwargs):
    """Train a net for some updates, change something, train on; and the same without graphs."""

    def run(*members):
        problem, hooks = net(**kwargs), (fl.when(lambda state: state.step == batches)(change),)
        step = fl.pipeline(*members, fl.clip(float("inf")))(problem.loss_fn)
        return fl.fit(step, problem.state(), [problem.batches[0]] * 2 * batches, hooks=hooks)

    captured = run(fl.cuda_graph(warmup=1))
    assert_same(captured, run())
    return done(recorders)


def test_a_learning_rate_that_a_hook_sets_is_filled_in(recorders):
    def change(state):
        state.optimizer.param_groups[0]["lr"] = 0.5
        return state

    assert stopping(recorders, change).count("run") == 1


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


@pytest.mark.parametrize(
    "change",
    [
        *(momentum, freeze, evaluation_mode),
        *(other_memory, other_memory_of_the_rate, other_optimizer_state),
    ],
)
def test_a_change_between_two_updates_makes_new_graphs(change, recorders):
    assert [entry for entry in stopping(recorders, change) if "replay" not in entry] == [
        "run",
        "record 0",
    ] * 2


def test_a_slot_that_is_replaced_from_outside_makes_a_new_graph(recorders):
    problem = net()

    def run(*members):
        step, state = fl.pipeline(average(0.5), *members)(problem.loss_fn), problem.state()
        for i in range(6):
            if i == 4:
                state = attrs.evolve(
                    state, slots={"average": [torch.zeros_like(t) for t in state.slots["average"]]}
                )
            state, _ = step(state, problem.batches[0])
        return state

    assert_same(run(fl.cuda_graph(warmup=1)), run())


def test_tensors_of_a_slot_that_are_replaced_from_outside_make_a_new_graph(recorders):
    def replace(state):
        if state.step == 4:
            state.slots["average"][:] = [torch.zeros_like(t) for t in state.slots["average"]]
        return state

    def run(*members):
        step = fl.pipeline(average(0.9), *members)(net().loss_fn)
        return fl.fit(step, net().state(), net().batches[:1] * 9, hooks=(replace,))

    assert_same(run(fl.cuda_graph(warmup=1)), run())
    assert done(recorders).count("run") == 2


def test_a_number_of_a_module_that_a_hook_changes_makes_a_new_graph(recorders):
    class Scaled(nn.Linear):
        beta = None

        def forward(self, x):
            return super().forward(x) * self.beta

    def model():
        made = Scaled(4, 1)
        made.beta = 1.0
        return made.double()

    def anneal(state):
        state.model.beta = 0.5 if state.step >= 4 else 1.0
        return state

    def run(*members):
        step = fl.pipeline(*members)(lambda model, batch: model(batch).square().mean())
        torch.manual_seed(0)
        made = model()
        state = fl.TrainState.create(made, fused_sgd(made.parameters()), seed=0)
        return fl.fit(step, state, [torch.ones(2, 4, dtype=torch.float64)] * 9, hooks=(anneal,))

    assert_same(run(fl.cuda_graph(warmup=1)), run())
    assert done(recorders).count("run") == 2


def test_a_slot_that_is_replaced_before_every_update_causes_a_warning(recorders, caplog):
    @fl.middleware("step")
    def renewed():
        def wrap(step):
            def renewing(state, batch):
                return step(attrs.evolve(state, slots={"average": [torch.zeros(())]}), batch)

            return renewing

        return wrap

    step = fl.pipeline(average(0.5), renewed(), fl.cuda_graph(warmup=1))(toy_loss)
    fl.fit(step, toy(), ones(*[1] * 450), hooks=())
    assert len(caplog.messages) == 1
    assert "because a slot that the update reads keeps changing" in caplog.text


def test_a_slot_of_the_step_ring_may_change_with_every_update(recorders):
    @fl.middleware("step")
    def counter():
        def wrap(step):
            def counted(state, batch):
                state, out = step(state, batch)
                return attrs.evolve(
                    state, slots={**state.slots, "counter": state.slots["counter"] + 1}
                ), out

            return counted

        return fl.Middleware("counter", step=wrap, init=lambda state: 0)

    state = fl.fit(
        fl.pipeline(counter(), fl.cuda_graph(warmup=1))(toy_loss), toy(), ones(1, 2, 3, 4), hooks=()
    )
    assert (state.slots["counter"], state.model.w.item(), done(recorders).count("run")) == (
        4,
        -10.0,
        1,
    )


def test_another_state_has_graphs_of_its_own(recorders):
    step, one = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss), toy()
    two = fl.snapshot(one)
    for batch in ones(1, 2, 3):
        one, _ = step(one, batch)
    for batch in ones(10, 20, 30):
        two, _ = step(two, batch)
    assert (one.model.w.item(), two.model.w.item()) == (-6.0, -60.0)


def test_a_hook_may_return_to_a_snapshot(recorders):
    def run(*members):
        kept, went = [], []

        def back(state):
            if state.step == 3 and not kept:
                kept.append(fl.snapshot(state))
            if state.step == 5 and not went:
                went.append(state)
                return kept[0]
            return state

        problem = net()
        state = fl.fit(
            fl.pipeline(*members)(problem.loss_fn),
            problem.state(),
            problem.batches,
            epochs=2,
            hooks=(back,),
        )
        assert went
        return state

    assert_same(run(fl.cuda_graph(warmup=1)), run())


def test_parameters_added_between_two_runs_are_trained(recorders):
    def run(*members):
        problem = net()
        step, state = fl.pipeline(*members)(problem.loss_fn), problem.state()
        state = fl.fit(step, state, [problem.batches[0]] * 3, hooks=())
        with torch.random.fork_rng():
            torch.manual_seed(0)
            state.model.append(nn.Linear(1, 1).double())
        state.optimizer.add_param_group({"params": state.model[-1].parameters()})
        return fl.fit(step, state, [problem.batches[0]] * 3, epochs=2, hooks=())

    captured, plain = run(fl.cuda_graph(warmup=1)), run()
    for mine, theirs in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_a_second_run_reuses_the_graphs_of_the_first(recorders):
    step = fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss)
    state = fl.fit(step, toy(), ones(1, 2), hooks=())
    fl.fit(step, state, ones(1, 2), epochs=2, hooks=())
    assert done(recorders) == ["run", "record 0", "replay 0", "replay 0", "replay 0"]


def test_updates_that_are_never_captured_cause_one_warning(recorders, caplog):
    step = fl.pipeline(fl.cuda_graph())(toy_loss)
    fl.fit(step, toy(), [torch.ones(n) for n in range(1, 220)], hooks=())
    assert len(caplog.messages) == 1
    assert "because the shapes of the batches keeps changing" in caplog.text
    caplog.clear()
    fading = fl.schedule(schedules.linear(), field="weight_decay")
    state = toy()
    state.optimizer.param_groups[0]["weight_decay"] = 0.1
    fl.fit(fl.pipeline(fl.cuda_graph(), fading)(toy_loss), state, ones(*[1] * 120), hooks=())
    assert "because a setting of the optimizer (weight_decay) keeps changing" in caplog.text


def test_eager_updates_count_from_the_last_replay(recorders, caplog):
    sizes = [*range(1, 61), 60, 60, *range(61, 121)]
    fl.fit(
        fl.pipeline(fl.cuda_graph(warmup=1))(toy_loss),
        toy(),
        [torch.ones(n) for n in sizes],
        hooks=(),
    )
    assert done(recorders).count("run") == 120
    assert not caplog.messages


def thaw(state):
    return fl.unfreeze(state, "0.weight", lr=0.5)


@pytest.mark.parametrize("optimizer", [fused_sgd, capturable_adam])
@pytest.mark.parametrize("change", [lambda state: fl.freeze(state, "0.weight"), thaw])
def test_what_is_trained_may_change_between_two_updates(recorders, change, optimizer):
    log = stopping(recorders, change, optimizer=optimizer)
    assert log.count("run") == 2 and any(entry.startswith("replay") for entry in log)


def test_phases_that_train_more_and_more_are_captured_each(recorders):
    problem = net()

    def run(*members):
        step = fl.pipeline(fl.schedule(schedules.linear()), *members)(problem.loss_fn)
        state = fl.freeze(problem.state(), "0")
        state = fl.fit(step, state, problem.batches, epochs=3, hooks=(), phase="head")
        state = fl.unfreeze(state, "0", lr=0.01)
        return fl.fit(step, state, problem.batches, epochs=3, hooks=(), phase="all")

    captured, plain = run(fl.cuda_graph(warmup=1)), run()
    assert [float(g["lr"]) for g in captured.optimizer.param_groups] == [
        float(g["lr"]) for g in plain.optimizer.param_groups
    ]
    for a, b in zip(captured.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_number_that_a_module_deletes_makes_a_new_graph():
    state = toy()
    state.model.first = 1
    guards = GuardSet(state)
    del state.model.first
    assert guards.violated(state) == "a number of a module"
    guards.snapshot()  # as after an eager update
    assert guards.violated(state) is None
