"""diff: the first difference between states, checkpoints, histories and runs, and how much."""

import math

import attrs
import pytest
import torch

import fnloop as fl
from fnloop._extensions.checkpoints.compare import measure
from fnloop.debug import diff
from fnloop.testing import small, stochastic, toy, toy_loss

BATCHES = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]


def t(*values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype)


@pytest.mark.parametrize(("a", "b", "elements", "index", "largest", "steps"), [
    (t(1, 2, 3), t(1, 2.5, 4), 2, (1,), 1.0, 1 << 21),  # 2 and 2.5 are a quarter binade apart
    (t(1, math.nan), t(1, math.nan), None, None, None, None),
    (t(math.nan), t(-math.nan), None, None, None, None),  # which have other bits
    (t(1, math.nan), t(1, 2), 1, (1,), math.nan, 1), (t(0.0), t(-0.0), 1, (0,), 0.0, None),
    (t(1.0), t(1.0).nextafter(t(2.0)), 1, (0,), 2.0**-23, 1),
    (t(1, dtype=torch.int64), t(4, dtype=torch.int64), 1, (0,), 3.0, None),
    (t(True, dtype=torch.bool), t(False, dtype=torch.bool), 1, (0,), 1.0, None),
    (t(1 + 2j, dtype=torch.complex64), t(1 + 3j, dtype=torch.complex64), 1, (0, 1), 1.0, None),
    (torch.zeros(2, 3), torch.eye(3)[:2], 2, (0, 0), 1.0, None),
])  # fmt: skip
def test_how_much_two_tensors_differ(a, b, elements, index, largest, steps):
    found = measure(a, b)
    if elements is None:
        assert found is None
        return
    assert (found.elements, found.total) == (elements, a.numel() * (1 + a.is_complex()))
    assert found.index == index
    assert found.largest == largest or (math.isnan(found.largest) and math.isnan(largest))
    if steps is not None and not math.isnan(largest):
        assert found.steps == steps


def test_one_flipped_bit_is_found_and_named():
    a, b = small().state(), small().state()
    with torch.no_grad():
        b.model[0].bias.view(torch.int64)[3].bitwise_xor_(1)
    found = diff(a, b)
    (finding,) = found.findings
    assert (finding.kind, finding.name) == ("tensor", "model.0.bias")
    measured = finding.measured
    assert (measured.elements, measured.total, measured.index, measured.steps) == (1, 8, (3,), 1)
    assert "1 of 8 elements differ" in repr(found) and "model.0.bias" in found._repr_html_()


def test_the_first_of_each_kind_in_order():
    """After two updates with other rates: the records, the step, the rate, and both tensors."""
    problem = small()
    step = fl.pipeline()(problem.loss_fn)
    a = fl.fit(step, problem.state(), problem.batches, epochs=1, hooks=())
    b = problem.state()
    b.optimizer.param_groups[0]["lr"] = 0.5
    b = fl.fit(step, b, problem.batches, steps=6, hooks=())
    found = diff(a, b)
    assert [f.kind for f in found.findings] == ["record", "counter", "setting", "tensor"]
    assert [f.name for f in found.findings[1:]] == [
        *("step", "optimizer.param_groups.0.lr", "model.0.weight")
    ]
    assert found.findings[1].text == "is 7 in one, and 6 in the other"
    # Four parameters, as many momentum buffers, and two generators, which only b has in mid-epoch.
    assert found.others == 4 + 4 + 2 - 1
    assert "and 9 more tensors" in repr(found)


def test_slots_averages_and_generators_are_compared():
    problem = stochastic()
    step = fl.pipeline(fl.ema(0.5))(problem.loss_fn)
    a, b = (fl.fit(step, problem.state(), problem.batches, hooks=()) for _ in range(2))
    assert not diff(a, b) and repr(diff(a, b)) == "states are equal, bit for bit"
    assert "bit for bit" in diff(a, b)._repr_html_()
    b.slots["ema"]["1.running_mean"][0] += 1
    assert diff(a, b).tensor.name == "ema.1.running_mean"
    seeds = [attrs.evolve(problem.state(), seed=seed) for seed in (1, 2)]
    assert diff(*seeds).findings[0].text == "is 1 in one, and 2 in the other"


def run(folder, loss_fn=toy_loss, epochs=2):
    hooks = (fl.every(steps=2)(fl.checkpoint(folder, keep=None)),)
    return fl.fit(fl.pipeline()(loss_fn), toy(), (BATCHES, BATCHES), epochs=epochs, hooks=hooks)


def doubled(model, batch):
    loss = toy_loss(model, batch)[0]
    return loss * 2 if batch.item() == 4 else loss


def test_a_state_and_its_checkpoint_are_equal(tmp_path):
    state = run(tmp_path)
    path = fl.latest(tmp_path)
    assert not diff(state, path) and not diff(str(path), state) and not diff(path, path)
    found = diff(tmp_path / "step-00000002", path)
    assert found.findings[0].kind == "record" and found.tensor.name == "model.w"


def test_two_runs(tmp_path):
    a, b = run(tmp_path / "a"), run(tmp_path / "b", doubled)
    assert not diff(tmp_path / "a", tmp_path / "a")
    found = diff(tmp_path / "a", tmp_path / "b")
    assert [f.kind for f in found.findings] == ["record", "checkpoint", "tensor"]
    record, checkpoint, tensor = found.findings
    assert [f.name for f in found.findings] == ["record 0, step 4", "step 4", "model.w"]
    # The losses of 4 updates are -(0×1, 1×2, 3×3, 6×4), the last one twice
    assert record.text.startswith("train/loss is -8.75 in one, and -14.75 in the other, 6 apart")
    assert tensor.measured.values == (-10, -14)
    assert found.checkpoint is checkpoint and found.record is record
    assert diff(a.history, b.history).record == record
    assert not diff(a.history, a.history)


def test_times_and_closing_records_are_not_compared():
    step = fl.pipeline(fl.timings())(toy_loss)
    a = fl.fit(step, toy(), BATCHES, epochs=2, hooks=())
    b = fl.fit(step, toy(), BATCHES, steps=6, hooks=())
    b = fl.fit(step, b, BATCHES, epochs=2, hooks=())
    assert len(a.history) == 2 and len(b.history) == 3
    assert not diff(a.history, b.history) and not diff(a, b)


def test_runs_of_another_length(tmp_path):
    run(tmp_path / "a"), run(tmp_path / "b", epochs=1)
    found = diff(tmp_path / "a", tmp_path / "b")
    assert found.record.text == "2 records in one, and 1 in the other"
    assert found.checkpoint is None


@pytest.mark.parametrize(("a", "b", "error", "said"), [
    (3, toy(), TypeError, "diff expects a as a state, a history, or the path"),
    (toy(), fl.History(), TypeError, "two histories, or two runs; got a TrainState and a Hist"),
    (toy(), "no/such/folder", fl.CheckpointError, "does not exist. Checkpoints are written by"),
])  # fmt: skip
def test_what_cannot_be_compared_is_refused(a, b, error, said):
    with pytest.raises(error, match=said):
        diff(a, b)
