"""The seam between one process and several: the answers of the engine for one process."""

import gc
import inspect
import re
import weakref
from collections import Counter
from pathlib import Path

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._backend import collectives
from fnloop._backend.processes import Backend
from fnloop._extensions.engines import exchanges
from fnloop._extensions.engines.distributed import DistributedEngine
from fnloop._extensions.engines.exact import ExactDistributedEngine, ExactEngine
from fnloop._step.engine import Engine, LocalEngine, engine_of
from fnloop._step.gradients import WeightedSum
from fnloop.testing import toy, toy_loss

ROOT = Path(fl.__file__).parent


def in_two_processes():
    """Return a state that believes it is one of two. Nothing is exchanged until it is trained."""
    return attrs.evolve(toy(), backend=Backend("cpu", world_size=2))


def test_in_one_process_the_engine_returns_what_it_is_given():
    mine, out = engine_of(toy()), fl.Output(torch.tensor(2.0), 3)
    assert mine is engine_of(toy())
    assert (mine.largest(3), mine.largest(False)) == (3, False)
    assert mine.mean_loss(out) is out.loss
    metrics = {"loss": fl.Mean(6.0, 3)}
    assert mine.reduce(metrics) == mine.reduce(metrics, "train/") == metrics


def test_a_window_is_the_weighted_mean_of_its_batches_and_combines_their_metrics():
    """(3 × 2 + 1 × 6) / 4"""
    total = WeightedSum()
    total.add(fl.Output(torch.tensor(2.0), 3, metrics={"n": fl.Sum(1)}))
    total.add(fl.Output(torch.tensor(6.0), 1, metrics={"n": fl.Sum(2)}))
    out = total.output()
    assert (out.loss.item(), out.weight, out.metrics["n"].compute()) == (3.0, 4, 3.0)


@pytest.mark.parametrize("weight", [0, torch.tensor(0)])
def test_a_batch_may_have_no_item(weight):
    loss_fn = lambda model, batch: (toy_loss(model, batch)[0], {"weight": weight})
    _, out = fl.pipeline()(loss_fn)(toy(), torch.ones(1))
    assert out.weight == 0


def test_states_of_one_model_share_a_distributed_engine_and_a_snapshot_has_its_own():
    state = in_two_processes()
    mine = engine_of(state)
    assert isinstance(mine, DistributedEngine)
    assert engine_of(attrs.evolve(state, stop="later")) is mine
    assert engine_of(fl.snapshot(state)) is not mine


def test_a_distributed_engine_dies_with_its_states():
    state = in_two_processes()
    found = weakref.ref(engine_of(state))
    del state
    gc.collect()
    assert found() is None


def test_only_the_engine_looks_at_the_number_of_processes():
    """A comparison elsewhere in steps, middleware or metrics is a branch to move there."""
    branch = re.compile(r"(world_size|processes)\s*(==|>|!=|<)|if .*\bworld_size\b")
    rooms = "_step/*", "_extensions/middleware/*", "_extensions/engines/*", "_extensions/alternate"
    files = [path for room in rooms for path in sorted(ROOT.glob(f"{room}.py"))]
    files = [path for path in files if path.stem not in ("join", "launch")]  # they make the number
    files.append(ROOT / "_core/metrics.py")
    found = [
        f"{path.name}: {line.strip()}"
        for path in files
        for line in path.read_text().splitlines()
        if branch.search(line)
    ]
    one = "backend.world_size == 1"
    assert found == [
        f"engine.py: if {one} and not backend.exact and backend.engine is None:",
        "exact.py: return ExactEngine(state) if state.backend.world_size == 1 "
        "else ExactDistributedEngine(state)",
    ]


class Counting:
    """An engine that counts what a run asks of the one that it wraps: any with these methods is."""

    def __init__(self, state):
        self.inner, self.calls = LocalEngine(), Counter()

    def __getattr__(self, name):
        found = getattr(self.inner, name)
        if not callable(found):
            return found

        def counted(*args, **kwargs):
            self.calls[name] += 1
            return found(*args, **kwargs)

        return counted


def test_a_run_asks_the_engine_that_its_state_was_given(tmp_path):
    """2 epochs of 3 batches in windows of 2: 2 updates each, and an evaluation after each epoch."""
    loaders = {"train": [torch.ones(1)] * 3, "valid": [torch.ones(1)]}
    step = fl.pipeline(fl.accumulate(2))(toy_loss)
    state = attrs.evolve(toy(), backend=Backend("cpu", engine=Counting))
    engine = engine_of(state)
    done = fl.fit(step, state, loaders, epochs=2, hooks=())
    assert engine_of(done) is engine
    assert engine_of(attrs.evolve(done, backend=Backend("cpu"))) is not engine
    asked = {"begin": 1, "read_from": 2, "start": 4, "start_evaluation": 2, "reduce": 2}
    assert engine.calls == asked
    assert done.model.w.item() == fl.fit(step, toy(), loaders, epochs=2, hooks=()).model.w.item()
    fl.save(done, tmp_path / "state")
    assert engine.calls == {**asked, "check_alike": 1, "gather": 1}


def test_each_method_of_an_engine_is_documented_and_all_engines_have_it():
    asked = [name for name in vars(Engine) if not name.startswith("_")]
    assert len(asked) == 17
    for name in asked:
        assert inspect.getdoc(getattr(Engine, name)), name
        for kind in (LocalEngine, DistributedEngine, ExactEngine, ExactDistributedEngine):
            assert hasattr(kind, name), (kind, name)


@pytest.mark.parametrize("step", [
    fl.pipeline(fl.tbptt(2))(lambda model, batch, carry: model.w),
    fl.raw(lambda state, batch: fl.Output(torch.tensor(1.0), 1)),
], ids=["tbptt", "raw"])  # fmt: skip
def test_what_works_in_one_process_only_is_refused_in_several(step):
    with pytest.raises(NotImplementedError, match="one process only"):
        step.init_slots(in_two_processes())


def test_several_processes_answer_each_question_of_the_kernel():
    questions = [
        one
        for one in vars(collectives).values()
        if inspect.isfunction(one) and hasattr(one, "__wrapped__")
    ]
    parameters = lambda function: [*inspect.signature(function).parameters.values()]
    assert len(questions) > 10
    for one in questions:
        theirs = getattr(exchanges, one.__name__)
        assert [(p.name, p.default) for p in parameters(one)] == [
            (p.name, p.default) for p in parameters(theirs)
        ], one.__name__
