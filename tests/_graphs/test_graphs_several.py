"""Graphs of updates with several optimizers."""

import attrs
import pytest
import torch
from graph_problems import capturable_adam, done, fused_sgd
from several import fused_sgd_twice, muon_and_sgd, problem, stopped_after

import fnloop as fl
from fnloop import CaptureError, schedules
from fnloop.testing import assert_same, law_fold, law_no_host_reads

LINEAR = schedules.linear()


def sgd_and_adam(parameters):
    parameters = list(parameters)
    return {
        "matrices": fused_sgd([p for p in parameters if p.ndim == 2]),
        "rest": capturable_adam([p for p in parameters if p.ndim != 2]),
    }


TABLE = [
    (),
    (fl.accumulate(3), fl.clip(0.05)),
    (fl.schedule(LINEAR),),
    (fl.schedule(LINEAR, only="rest"), fl.schedule(schedules.cosine(warmup=2), only="matrices")),
]


@pytest.mark.parametrize("members", TABLE, ids=repr)
@pytest.mark.parametrize("optimizers", [fused_sgd_twice, sgd_and_adam])
def test_a_run_with_graphs_is_the_same_bit_for_bit(members, optimizers, recorders):
    one = problem(optimizers)

    def run(*members):
        step = fl.pipeline(*members)(one.loss_fn)
        return fl.fit(step, one.state(), one.batches, epochs=4, hooks=())

    captured = run(*members, fl.cuda_graph(warmup=1))
    assert sum(entry.startswith("replay") for entry in done(recorders)) > len(done(recorders)) / 2
    assert captured.updates == {"matrices": captured.step, "rest": captured.step}
    assert_same(captured, run(*members))


def test_the_laws_hold(recorders):
    pipe = fl.pipeline(fl.accumulate(2), fl.cuda_graph(warmup=1))
    law_fold(pipe, problem(fused_sgd_twice))
    law_no_host_reads(pipe, problem(fused_sgd_twice))


def plain_sgd_twice(parameters, **settings):
    parameters = list(parameters)
    groups = [p for p in parameters if p.ndim == 2], [p for p in parameters if p.ndim != 2]
    matrices, rest = (torch.optim.SGD(group, lr=0.5, foreach=None) for group in groups)
    for group in rest.param_groups:
        group.update(settings)
    return {"matrices": matrices, "rest": rest}


def test_all_are_made_capturable(recorders):
    one = problem(plain_sgd_twice)
    step = fl.pipeline(fl.cuda_graph(warmup=1))(one.loss_fn)
    state = fl.fit(step, one.state(), one.batches, hooks=())
    for optimizer in state.optimizer.values():
        (group,) = optimizer.param_groups
        assert isinstance(group["lr"], torch.Tensor) and group["fused"]


def test_if_one_cannot_be_captured_none_is_changed(recorders):
    one = problem(lambda parameters: plain_sgd_twice(parameters, foreach=True))
    state = one.state()
    with pytest.raises(CaptureError, match=r"write SGD\(..., fused=True\)"):
        fl.pipeline(fl.cuda_graph())(one.loss_fn)(state, one.batches[0])
    for optimizer in state.optimizer.values():
        (group,) = optimizer.param_groups
        assert (group["lr"], group["fused"]) == (0.5, None)


def test_a_failure_during_the_warm_up_leaves_all_unchanged(recorders):
    def failing(model, batch):
        raise ArithmeticError

    state = problem(plain_sgd_twice).state()
    with pytest.raises(ArithmeticError):
        fl.pipeline(fl.cuda_graph())(failing)(state, problem().batches[0])
    for optimizer in state.optimizer.values():
        (group,) = optimizer.param_groups
        assert (group["lr"], group["fused"]) == (0.5, None)


def test_a_count_on_the_host_is_found_in_each_and_undone(recorders):
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.state["calls"] = self.state.get("calls", 0) + 1
            super().step(closure)

    def optimizers(parameters):
        named = fused_sgd_twice(parameters)
        groups = named["rest"].param_groups
        return named | {"rest": Counting([{"params": groups[0]["params"]}], lr=0.5, fused=True)}

    one = problem(optimizers)
    step, state = fl.pipeline(fl.cuda_graph(warmup=1))(one.loss_fn), one.state()
    state, _ = step(state, one.batches[0])
    with pytest.raises(
        CaptureError, match=r"the state of the optimizer 'rest'.* is changed on the"
    ):
        step(state, one.batches[0])
    assert state.optimizer["rest"].state["calls"] == 1


def test_muon_is_refused_by_name_before_anything_is_changed(recorders):
    one = problem(muon_and_sgd)
    step, state = fl.pipeline(fl.cuda_graph())(one.loss_fn), one.state()
    with pytest.raises(CaptureError, match=r"^Muon reads numbers to the host in every update"):
        step(state, one.batches[0])
    assert state.optimizer["rest"].param_groups[0]["lr"] == 0.05


def test_a_change_of_a_setting_of_the_second_is_noticed(recorders):
    one = problem(fused_sgd_twice)
    step = fl.pipeline(fl.cuda_graph(warmup=1))(one.loss_fn)

    def run(step):
        state = fl.fit(step, one.state(), one.batches, epochs=2, hooks=(stopped_after(5),))
        state.optimizer["rest"].param_groups[0]["momentum"] = 0.5
        return fl.fit(step, attrs.evolve(state, stop=None), one.batches, epochs=2, hooks=())

    assert_same(run(step), run(fl.pipeline()(one.loss_fn)))
