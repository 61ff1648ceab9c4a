"""Updates of several processes are made again, audited, verified and watched by all together."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from crafted import craft
from joined import rank, world
from process_data import loader, samples
from process_problems import adamw, created, dropping, entropy
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.debug import AuditError, audit, diff, replay, verify, watch
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow
BAD = 17  # a sample
fresh = lambda: created(False, adamw, dropping)


def replayed(folder, *members, update):
    """Make an update of a run again, whose checkpoints are of updates 2 and 6."""
    step, states = fl.pipeline(fl.accumulate(2), fl.clip(0.1), *members)(entropy), {}

    def keep(state):
        states[state.step] = fl.snapshot(state)
        return state

    saves = fl.when(lambda state: state.step in (2, 6))(fl.checkpoint(folder, keep=None))
    fl.fit(step, fresh(), loader(shuffle=True), epochs=3, hooks=(keep, saves))
    made = replay(folder, step, fresh(), loader(shuffle=True), update=update)
    assert_same(made.before, states[update - 1])
    assert_same(made.after, states[update])
    assert [[*index] for index in made.indices] == [b[3].tolist() for b in made.batches]
    return made


def again(folder):
    made = replayed(folder / "runs", fl.ema(0.9), update=6)
    assert made.confirmed and not diff(made.after, folder / "runs" / "step-00000006")
    grads = {name: grad.sum().item() for name, grad in made.grads.items()}
    nesterov = lambda params: torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)
    for outer, update in itertools.product((None, nesterov), (3, 6)):
        runs = folder / f"{update} {outer is None}"
        made = replayed(runs, fl.local_sgd(4, outer), update=update)
        assert made.confirmed is None  # each process has a part of what is compared
        with pytest.raises(NotImplementedError, match="or by local_sgd, cannot be compared"):
            diff(made.after, made.after)

    x, y = samples().tensors[:2]
    x[BAD] = math.nan
    bad = DataLoader(TensorDataset(x, y), batch_size=3, shuffle=True)
    hooks = fl.halt_on_nonfinite(keep=True), fl.at_start()(fl.checkpoint(folder / "bad", keep=None))
    step = fl.pipeline()(entropy)
    state = fl.fit(step, fresh(), bad, hooks=hooks)
    place = state.extra["nonfinite"]
    nonfinite = replay(folder / "bad", step, fresh(), bad, update=place["step"]).nonfinite
    return [grads, place, state.stop], made.indices, nonfinite


def test_an_update_is_made_again_by_as_many_processes_and_all_name_a_bad_sample(launched):
    (same, first, bad), (others, second, good) = launched(again, 2)
    assert same == others
    mine, its = ({i for index in found for i in index} for found in (first, second))
    assert len(mine) == len(its) == 6 and not mine & its
    indices = same[1]["indices"]
    assert len(indices) == 2 and BAD in indices[0] + indices[1]
    assert sorted([bad, good]) == [[], [BAD]]


def audited(folder):
    """A run with ragged windows is the same; a fault of the last process ends all."""
    members = fl.accumulate(2), fl.clip(1.0), fl.ema(0.9)
    steps = fl.pipeline(*members)(entropy), fl.pipeline(*members, audit(every=1))(entropy)
    assert_same(*(fl.fit(s, created(), loader(size=2), epochs=2, hooks=()) for s in steps))
    own = torch.Generator().manual_seed(0)

    def loss_fn(model, batch):
        loss, aux = entropy(model, batch)
        faulty = rank() == world() - 1 and int(batch[-1][0]) >= 8 * world()
        return loss + (torch.rand((), generator=own) * loss if faulty else 0.0), aux

    found = []
    for against in (None, "eager"):
        step = fl.pipeline(fl.clip(1.0), audit(every=1, against=against))(loss_fn)
        with pytest.raises(AuditError) as caught:
            fl.fit(step, created(), loader(size=2), epochs=1, hooks=())
        error = caught.value
        found.append([str(error), error.parameter, error.state.step])
    return found


def test_all_processes_audit_the_same_updates_and_raise_together(launched):
    """The gradients are means over the processes, so they differ in each of them."""
    for (text, parameter, at), (eager, _, eager_at) in launched(audited, 2):
        assert (parameter, at, eager_at) == ("0.weight", 4, 4)
        assert "two makings of update 5 from the same state differ" in text
        assert eager.startswith("audit: update 5 differs from the one that is made eagerly,")
    assert "own in the closure of audited.loss_fn, a torch.Generator" in text


def watched(folder):
    step = fl.pipeline(watch(every=2))(entropy)
    return fl.fit(step, created(), loader(), epochs=2, hooks=()).history.to_dicts()


def test_what_is_watched_is_that_of_all_processes_together(launched):
    """The mean of root mean squares over processes is not that of all items: it is near."""
    (alone,) = launched(watched, 1)
    for of_each in launched(watched, 2):
        for one, other in zip(alone, of_each, strict=True):
            names = [name for name in one if "watch/" in name]
            assert len(names) == 7  # two linear layers with three numbers each, and a tanh
            for name in names:
                tolerance = 0.05 if name.endswith("activation") else 1e-4
                assert other[name] == pytest.approx(one[name], rel=tolerance), name


def verified(folder):
    """A run of several processes, of a plain and of a sharded model; then with a changed weight."""
    step = fl.pipeline(fl.accumulate(2), fl.clip(0.1), fl.ema(0.9, evaluate=False))(entropy)
    given = {"train": loader(shuffle=True), "valid": loader()}
    found = []
    for shard in (False, True):
        make = lambda: created(shard, adamw, dropping)
        saves = fl.every(steps=2)(fl.checkpoint(folder / str(shard), keep=None))
        fl.fit(step, make(), given, epochs=2, hooks=(saves,), record_every=fl.every(steps=1))
        for _ in range(2):
            state = make()
            report = verify(folder / str(shard), step, state, given, spans=None)
            found.append([[s.stop, s.holds, s.name] for s in report.spans] + [*report.faults])
            if rank() == 0:
                flip_last(folder / str(shard) / "step-00000004")
            dist.barrier()
    return found


def flip_last(path):
    """Flip a bit of a weight, that of the last process if it is sharded; fit the checksum."""
    file = max(path.glob("model*.safetensors"))
    tensors = load_file(file)
    tensors["0.weight"].view(torch.int32)[-1, -1] ^= 1 << 16
    save_file(tensors, file, metadata={"format": "pt"})
    entry = {"bytes": file.stat().st_size, "sha256": files.disk.checksum_of_file(file)}
    craft(path, lambda made: made["files"].update({file.name: entry}))


def test_the_spans_of_a_run_of_several_processes_hold_unless_one_was_changed(launched):
    for found in launched(verified, 2):
        for elements, before, after in ((48, *found[:2]), (24, *found[2:])):
            assert [holds for _, holds, _ in before] == [True] * 3
            assert [stop for stop, holds, _ in after[:-1] if not holds] == [4, 6]
            text = f"but not through it. model.0.weight: 1 of {elements} elements"
            assert after[-1].startswith("step-00000004 was changed") and text in after[-1]
