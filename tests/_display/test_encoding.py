"""What is printed where stdout lacks a sign."""

import contextlib
import io

import pytest
import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

ONE = torch.ones(1)


def trained(step):
    return fl.fit(step, toy(), ([ONE], [ONE]), epochs=2, hooks=())


def printed(encoding, make):
    """Return what a console shows of what a function returns."""
    console = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with contextlib.redirect_stdout(console):
        print(make())
    console.flush()
    return console.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_lines_and_arrows_are_drawn_in_ascii(encoding):
    state = trained(fl.pipeline()(toy_loss))
    history = printed(encoding, lambda: state.history)
    assert history.splitlines()[0] == "            | valid    | train"
    assert "| parameters " in printed(encoding, lambda: fl.summary(state, ONE))
    step = fl.pipeline(fl.clip(1.0), fl.accumulate(2))(toy_loss)
    assert "backward > clip(1.0)" in printed(encoding, lambda: step)


def test_a_letter_that_is_missing_is_a_question_mark():
    state = trained(fl.pipeline(fl.metric(größe=lambda aux, batch: 1.0))(toy_loss))
    shown = printed("ascii", lambda: state.history)
    assert "gr??e" in shown and "größe" in printed("cp1252", lambda: state.history)
