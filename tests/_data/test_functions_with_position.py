"""Functions as loaders: with two arguments they are called with where to begin."""

import functools

import pytest
import torch

import fnloop as fl
from fnloop._data.loaders import takes_position
from fnloop._data.source import open_source
from fnloop.testing import assert_same, toy, toy_loss


def numbers(read, epoch, batch, n=6):
    for i in range(batch, n):
        read.append((epoch, i))
        yield torch.tensor([epoch + i + torch.rand(()).item()])


@pytest.mark.parametrize(("function", "expected"), [
    (lambda epoch, batch: [], True), (lambda e, b: [], True), (lambda e, b, size=3: [], True),
    (lambda epoch=0, batch=0: [], True), (functools.partial(numbers, []), True), (list, False),
    (lambda *a: [], False), (lambda path="x", size=3: [], False), (lambda epoch: [], False),
    (lambda a, b, c: [], False), ([], False),
])  # fmt: skip
def test_which_functions_take_a_position(function, expected):
    assert takes_position(function) is expected


def test_a_resume_reads_nothing_again():
    step, read = fl.pipeline(fl.accumulate(2))(toy_loss), []
    loader = functools.partial(numbers, read)
    whole = fl.fit(step, toy(), loader, epochs=2, hooks=())
    assert read == [(epoch, i) for epoch in range(2) for i in range(6)]
    for updates in range(1, 6):
        paused = fl.fit(step, toy(), loader, steps=updates, hooks=())
        read.clear()
        assert_same(fl.fit(step, paused, loader, epochs=2, hooks=()), whole)
        assert read[0] == divmod(2 * updates, 6)


def test_an_evaluation_begins_at_the_first_batch_of_epoch_0():
    read = []
    fl.evaluate(fl.pipeline()(toy_loss), toy(), functools.partial(numbers, read))
    assert read == [(0, i) for i in range(6)]


def test_each_of_several_processes_begins_at_the_same_batch():
    read = []
    source = open_source(functools.partial(numbers, read), 0, rank=1, processes=2)
    assert len(list(source.batches(3, 4, 0))) == 1
    assert read == [(3, 4), (3, 5)]


def test_a_function_with_one_argument_is_refused():
    says = r"expects the train loader as .*with \(epoch, batch\); .*takes \(epoch\)"
    with pytest.raises(TypeError, match=says):
        fl.fit(fl.pipeline()(toy_loss), toy(), lambda epoch: [])
