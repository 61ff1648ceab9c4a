"""Middleware in one line: what is done after the step of a ring."""

import attrs

import fnloop as fl


def after(ring, change, name="after", **settings):
    """Call ``change(state, batch, out)`` after the step. It may return another output."""

    def wrap(step):
        def changed(state, batch):
            state, out = step(state, batch)
            new = change(state, batch, out)
            return state, new if isinstance(new, fl.Output) else out

        return changed

    return fl.Middleware(name, **{ring: wrap}, **settings)


def skipping(when, why="no", ring="gradient"):
    """Leave out the updates for which ``when(batch, out)`` is true."""
    skipped = lambda state, batch, out: attrs.evolve(out, skip=why) if when(batch, out) else out
    return after(ring, skipped, "skipping")
