"""Audits and watches on several processes."""

import pytest
import torch
from process_problems import created, entropy, loader, rank, world

import fnloop as fl
from fnloop.debug import AuditError, audit, watch
from fnloop.testing import assert_same

pytestmark = pytest.mark.slow


def audited(folder):
    """A run with ragged windows is the same; a fault of the last process ends all."""
    members = fl.accumulate(2), fl.clip(1.0), fl.ema(0.9)
    runs = []
    for more in ((), (audit(every=1),)):
        torch.manual_seed(0)
        step = fl.pipeline(*members, *more)(entropy)
        runs.append(fl.fit(step, created(), loader(size=2), epochs=2, hooks=()))
    assert_same(*runs)
    own = torch.Generator().manual_seed(0)

    def loss_fn(model, batch):
        loss, aux = entropy(model, batch)
        faulty = rank() == world() - 1 and int(batch[-1][0]) >= 8 * world()
        return loss + (torch.rand((), generator=own) * loss if faulty else 0.0), aux

    found = []
    for against in (None, "eager"):
        step = fl.pipeline(fl.clip(1.0), audit(every=1, against=against))(loss_fn)
        try:
            fl.fit(step, created(), loader(size=2), epochs=1, hooks=())
        except AuditError as error:
            found.append([str(error), error.parameter, error.state.step])
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_all_processes_audit_the_same_updates_and_raise_together(launched, n):
    """The gradients are means over the processes, so they differ in each of them."""
    for of_each in launched(audited, n):
        (text, parameter, at), (eager, *rest) = of_each
        assert (parameter, at) == ("0.weight", 4)
        assert "two makings of update 5 from the same state differ" in text
        assert (eager.partition(",")[0], rest[1]) == (
            "audit: update 5 differs from the one that is made eagerly",
            4,
        )
    assert "own in the closure of audited.loss_fn, a torch.Generator" in text


def watched(folder):
    torch.manual_seed(0)
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
