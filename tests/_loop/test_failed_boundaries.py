"""A boundary that fails is repeated by the run that continues."""

import pytest
from loop_cases import (
    NUMBERS,
    ONE,
    Boom,
    Told,
    boom,
    failing_once,
    fit,
    half_way,
    interrupting,
    press,
    raising,
    terminate,
    two_weights,
)

import fnloop as fl
from fnloop.testing import assert_same, toy


@pytest.mark.parametrize(
    ("when_to", "fails_at", "position"),
    [
        (fl.every(epochs=1), 1, (3, 0, 3)),
        (fl.every(epochs=1), 2, (6, 1, 3)),
        (fl.every(steps=3), 1, (3, 0, 3)),  # the end of an epoch, by its steps
        (fl.every(steps=2), 1, (2, 0, 2)),  # within an epoch
        (fl.every(epochs=2), 1, (6, 1, 3)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("interrupt", [False, True], ids=["exception", "ctrl-c"])
def test_a_run_that_continues_after_a_failed_evaluation_repeats_it(
    when_to, fails_at, position, interrupt
):
    settings = {"epochs": 2, "evaluate_every": when_to}
    whole = fit(loaders=(NUMBERS, failing_once(0)), **settings)
    loaders = (NUMBERS, failing_once(fails_at, KeyboardInterrupt if interrupt else Boom))
    if interrupt:
        state = fit(loaders=loaders, **settings)
        assert state.stop == "interrupted"
    else:
        with pytest.raises(Boom) as caught:
            fit(loaders=loaders, **settings)
        state = caught.value.state
    assert (state.step, state.epoch, state.batch) == position
    assert list(state.metrics) == ["loss"]
    assert_same(fit(state, loaders, **settings), whole)


@pytest.mark.parametrize(
    "when_to", [fl.every(epochs=1), fl.every(steps=3), fl.every(steps=2)], ids=repr
)
def test_a_run_that_continues_from_a_file_after_a_failed_evaluation_repeats_it(when_to, tmp_path):
    settings = {"epochs": 2, "evaluate_every": when_to}
    whole = fit(loaders=(NUMBERS, failing_once(0)), **settings)
    loaders = (NUMBERS, failing_once(1))
    with pytest.raises(Boom) as caught:
        fit(loaders=loaders, **settings)
    restored = fl.restore(fl.save(caught.value.state, tmp_path / "a"), toy())
    assert_same(fit(restored, loaders, **settings), whole)


def test_a_hook_that_fails_does_so_after_the_record():
    with pytest.raises(Boom) as caught:
        fit(loaders=([ONE] * 3, [ONE]), hooks=(lambda state: state if state.step < 3 else boom(),))
    assert caught.value.__notes__ == [
        "while in <lambda>, train, epoch 1, batch 3, step 3"
    ]  # the epoch that has just ended
    state = caught.value.state
    assert (state.epoch, state.batch, len(state.history)) == (1, 0, 1)


@pytest.mark.parametrize(("how", "reason"), [(press, "interrupted"), (terminate, "SIGTERM")])
def test_an_evaluated_loader_killed_by_the_signal_that_stops_the_run_is_not_an_error(how, reason):
    def dies():
        yield ONE
        how()
        raise RuntimeError("DataLoader worker exited unexpectedly")

    state = fit(loaders=([ONE] * 3, dies), epochs=2)
    assert (state.step, state.epoch, state.batch, state.stop, len(state.history)) == (
        3,
        0,
        3,
        reason,
        0,
    )
    whole = fit(loaders=([ONE] * 3, [ONE]), epochs=2)
    assert_same(fit(state, ([ONE] * 3, [ONE]), epochs=2), whole)


def test_hooks_are_told_of_a_failure_and_cannot_hide_it():
    first, second = Told(fails=True), Told()
    with pytest.raises(Boom) as caught:
        fl.fit(
            fl.pipeline()(raising(Boom())),
            toy(),
            NUMBERS,
            hooks=(fl.every(epochs=9)(first), second),
        )
    note = "while in the loss function explode, train, epoch 1, batch 1, step 1"
    assert first.told == [(1, None, Boom, [note])]
    assert second.told[0][:3] == (1, None, Boom)
    assert caught.value.__notes__[0] == note
    assert "failed too: OSError: disk full" in caught.value.__notes__[1]


def test_hooks_are_told_of_no_interruption_and_of_no_failure_without_a_state():
    hook = Told()
    state, make = two_weights(half_way(boom))
    with pytest.raises(Boom):
        fl.fit(make, state, NUMBERS, hooks=(hook,))
    with pytest.raises(KeyboardInterrupt):
        fl.fit(interrupting(2, lambda: (press(), press())), toy(), NUMBERS, hooks=(hook,))
    assert hook.told == []
