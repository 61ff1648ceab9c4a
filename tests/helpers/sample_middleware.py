"""Middleware, metrics and a scheduler for the tables of tests: one middleware of each ring."""

import attrs
import torch
from torch.optim.lr_scheduler import ExponentialLR

import fnloop as fl


def output_mean(aux, batch):
    return aux["output"].mean()


def largest_output(aux, batch):
    return fl.Max(aux["output"].max())


def double_loss(numbers):
    return 2 * numbers["loss"]


def nesterov(parameters):
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True)


def decay(optimizer, run):
    return ExponentialLR(optimizer, 0.9)


class ByUpdates:
    """A scheduler that is told the updates: it halves the rate, and notes what it is told."""

    def __init__(self, optimizer, told=()):
        self.optimizer, self.told = optimizer, told
        self.first = optimizer.param_groups[0]["lr"]

    def step_update(self, num_updates):
        if isinstance(self.told, list):
            self.told.append(num_updates)
        self.optimizer.param_groups[0]["lr"] = self.first * 0.5**num_updates

    def state_dict(self):
        return {"first": self.first}

    def load_state_dict(self, state_dict):
        self.first = state_dict["first"]


def halved(optimizer, run):
    return ByUpdates(optimizer)


def warming_up(n):
    """The decay of an average that warms up to 0.9."""
    return min(0.9, (1 + n) / (10 + n))


@fl.middleware("gradient")
def noise(std):
    def wrap(step):
        def noisy(state, batch):
            state, out = step(state, batch)
            for p in state.model.parameters():
                if p.grad is not None:  # it may rest while others take their turn
                    p.grad.add_(torch.randn_like(p), alpha=std)
            return state, out

        return noisy

    return wrap


@fl.middleware("gradient")
def skip_negative():
    """Skip the update of a batch that begins with a negative number."""

    def wrap(step):
        def skipping(state, batch):
            state, out = step(state, batch)
            return state, attrs.evolve(out, skip="negative") if batch[0] < 0 else out

        return skipping

    return wrap


@fl.middleware("step")
def counted(calls):
    """Append to a list the steps at which it is called."""

    def wrap(step):
        def count(state, batch):
            calls.append(state.step)
            return step(state, batch)

        return count

    return wrap


@fl.middleware("loss")
def weight_penalty(factor):
    def wrap(step):
        def penalized(state, batch):
            state, out = step(state, batch)
            penalty = sum(p.square().sum() for p in state.model.parameters())
            return state, attrs.evolve(out, loss=out.loss + factor * penalty)

        return penalized

    return wrap


@fl.middleware("update")
def average(decay):
    """Keep an average of the parameters, updated in place."""

    def wrap(step):
        def averaged(state, batch):
            state, out = step(state, batch)
            if out.skip is None:
                torch._foreach_lerp_(
                    state.slots["average"],
                    [p.detach() for p in state.model.parameters()],
                    1 - decay,
                )
            return state, out

        return averaged

    return fl.Middleware(
        "average",
        update=wrap,
        init=lambda state: [p.detach().clone() for p in state.model.parameters()],
    )


@fl.middleware("gradient")
def repeat(*batches):
    """Call the step with its own batch, then with each of these, or with its own again."""

    def wrap(step):
        def repeated(state, batch):
            state, out = step(state, batch)
            for another in batches or (batch,):
                state, out = step(state, another)
            return state, out

        return repeated

    return wrap


def judge_finite(state, bad):
    return "a guard of one's own" if bad else None


@fl.middleware("gradient")
def own_guard():
    """A guard by ``decide``: leave updates out whose gradients are not finite."""

    def wrap(step):
        def guarded(state, batch):
            state, out = step(state, batch)
            if out.skip is not None:
                return state, out
            gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
            bad = ~torch.nn.utils.get_total_norm(gradients).isfinite()
            return fl.decide(state, out, bad, judge_finite)

        return guarded

    return wrap


@fl.middleware("gradient")
def calls(ring="gradient", keeps=True):
    """Count its calls in a tensor, in place. What an update that is left out adds is put back."""

    def keep(state):
        count = state.slots["calls"]
        before = count.clone()
        return lambda: count.copy_(before)

    def wrap(step):
        def counted(state, batch):
            state.slots["calls"].add_(1)
            return step(state, batch)

        return counted

    made = {"init": lambda state: torch.zeros(()), "keep": keep if keeps else None}
    return fl.Middleware("calls", **{ring: wrap}, **made)
