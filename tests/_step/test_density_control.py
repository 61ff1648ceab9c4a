"""A tiny Gaussian splatting: points are cloned and pruned during the run, as by hand."""

import pytest
import torch
from torch import nn

import fnloop as fl

UPDATES, EVERY = 24, 4


class Splats(nn.Module):
    """A function of a line: a sum of Gaussians."""

    def __init__(self, n=6):
        super().__init__()
        drawn = torch.randn(3, n, generator=torch.Generator().manual_seed(0))
        self.means, self.widths, self.heights = (nn.Parameter(row.clone()) for row in drawn)

    def forward(self, x):
        off = (x[:, None] - self.means) * self.widths.exp()
        return (self.heights * (-off.square()).exp()).sum(1)


def loss_fn(model, x):
    return (model(x) - torch.sin(3 * x)).square().mean()


NAMES = ("means", "widths", "heights")
RATES = dict(zip(NAMES, (0.02, 0.05, 0.1), strict=True))


def of_groups(model):
    groups = [{"params": [getattr(model, k)], "lr": RATES[k], "name": k} for k in NAMES]
    return torch.optim.Adam(groups)


def of_several(model):
    return {k: torch.optim.Adam([getattr(model, k)], lr=RATES[k]) for k in NAMES}


def listed(optimizer):
    return [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer.values()]


@torch.no_grad()
def densify_and_prune(model, optimizers):
    """Take out the lowest point, and clone the two highest: there is one more each time."""
    order = model.heights.abs().argsort()
    chosen = torch.cat([order[1:].sort().values, order[-2:]])
    is_clone = torch.arange(len(chosen)) >= len(order) - 1
    for one in optimizers:
        for group in one.param_groups:
            (old,) = group["params"]
            name = next(k for k in NAMES if getattr(model, k) is old)
            new = nn.Parameter(old[chosen].clone())
            new[is_clone] += 0.1
            state = one.state.pop(old)
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = state[key][chosen] * ~is_clone
            one.state[new], group["params"] = state, [new]
            setattr(model, name, new)


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.rand(16, generator=draw) * 4 - 2 for _ in range(UPDATES)]


def weights(model):
    return {name: p.tolist() for name, p in model.named_parameters()}


def by_hand(make, clip):
    model, seen = Splats(), []
    optimizers = listed(make(model))
    for i, x in enumerate(batches(), 1):
        loss_fn(model, x).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for one in optimizers:
            one.step()
            one.zero_grad()
        if i % EVERY == 0:
            densify_and_prune(model, optimizers)
        seen.append(weights(model))
    return seen


class Killed(BaseException):
    pass


def control(seen, kill_at=None):
    """Return the hooks of a script: the density control, and what looks at the weights."""

    def densify(state):
        if state.step % EVERY == 0:
            densify_and_prune(state.model, listed(state.optimizer))
        return state

    def note(state):
        if state.step == kill_at:
            raise Killed
        seen.append(weights(state.model))
        return state

    return densify, note


MEMBERS = {None: (), 0.5: (fl.clip(0.5),)}


@pytest.mark.parametrize("make", [of_groups, of_several])
@pytest.mark.parametrize("clip", MEMBERS)
def test_each_update_has_the_bits_of_the_loop_by_hand(make, clip):
    model, seen = Splats(), []
    state = fl.TrainState.create(model, make(model), seed=0)
    fl.fit(fl.pipeline(*MEMBERS[clip])(loss_fn), state, batches(), hooks=control(seen))
    assert seen == by_hand(make, clip)
    assert [len(one["means"]) for one in seen[EVERY - 1 :: EVERY]] == [7, 8, 9, 10, 11, 12]


@pytest.mark.parametrize("make", [of_groups, of_several])
@pytest.mark.parametrize("kill_at", [3, 4, 5, 8, 13, 23])
def test_a_killed_run_is_resumed_bit_for_bit(tmp_path, make, kill_at):
    """The model of the new process has as many points as in the beginning."""
    step = fl.pipeline(fl.clip(0.5), fl.ema(0.9))(loss_fn)
    saving = fl.every(steps=1)(fl.checkpoint(tmp_path))
    densify, note = control(seen := [], kill_at)
    model = Splats()
    state = fl.TrainState.create(model, make(model), seed=0)
    with pytest.raises(Killed):
        fl.fit(step, state, batches(), hooks=(densify, saving, note))
    model = Splats()
    state = fl.TrainState.create(model, make(model), seed=0)
    state = fl.resume(tmp_path, state, shapes="file")
    assert len(model.means) == 6 + kill_at // EVERY
    densify, note = control(seen)
    found = fl.fit(step, state, batches(), epochs=1, hooks=(densify, saving, note))
    assert seen == by_hand(make, 0.5)

    model = Splats()
    state = fl.TrainState.create(model, make(model), seed=0)
    whole = fl.fit(step, state, batches(), epochs=1, hooks=control([]))
    assert weights(fl.averaged(found).model) == weights(fl.averaged(whole).model)
