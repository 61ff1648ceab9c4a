"""halt_on_nonfinite: where a run stops, the steps in the reason, and reads from the device."""

import itertools
import math

import pytest
import torch
from host_reads import CountReads
from toy_runs import ONE, STEP, fit

import fnloop as fl
from fnloop import halt_on_nonfinite
from fnloop.testing import toy, toy_loss

NAN = math.nan
BAD = torch.tensor([NAN])
THIRD = [ONE, ONE, BAD, ONE, ONE]  # the third of five is bad
OFFER = "; to stop at once: halt_on_nonfinite(steps=1)"


def reason(interval, steps=100, value="nan"):
    offer = OFFER if interval.startswith("between") and steps > 1 else ""
    return f"halt_on_nonfinite: the training loss became {value} {interval}{offer}"


@pytest.mark.parametrize(("train", "steps", "settings", "stopped", "interval"), [
    ([BAD, ONE, ONE], 100, {}, 3, "between steps 1 and 3"),  # read at the end of the epoch
    (THIRD, 100, {}, 5, "between steps 1 and 5"),
    (THIRD, 2, {}, 4, "between steps 1 and 4"),  # the finite read at step 2 is not remembered
    ([ONE, ONE, ONE, BAD, ONE], 2, {}, 4, "between steps 1 and 4"),
    ([ONE, ONE, ONE, ONE, BAD], 2, {}, 5, "between steps 1 and 5"),
    ([ONE, BAD, ONE], 1, {}, 2, "between steps 1 and 2"), ([BAD], 100, {}, 1, "at step 1"),
    # every record is checked, and the mean is that since the last record
    (THIRD, 100, {"evaluate_every": fl.every(steps=2)}, 4, "between steps 3 and 4"),
    (THIRD, 100, {"record_every": fl.every(steps=1)}, 3, "at step 3"),
    (THIRD, 100, {"record_every": fl.every(steps=2)}, 4, "between steps 3 and 4"),
    (THIRD, 2, {"record_every": fl.every(steps=2)}, 4, "between steps 3 and 4"),
    (THIRD, 100, {"record_every": fl.every(steps=3)}, 3, "between steps 1 and 3"),
    (THIRD, 1, {"record_every": fl.every(steps=3)}, 3, "between steps 1 and 3"),
    (THIRD, 100, {"record_every": fl.every(steps=9)}, 5, "between steps 1 and 5"),
])  # fmt: skip
def test_it_halts_at_the_next_read_and_names_the_steps_since_the_last_record(
    train, steps, settings, stopped, interval
):
    loaders = {"train": train, "valid": [ONE]}
    state = fit(halt_on_nonfinite(steps), loaders=loaders, epochs=2, **settings)
    assert (state.step, state.stop) == (stopped, reason(interval, steps))


def test_a_bad_interval_that_it_has_not_seen_is_in_the_mean_of_the_epoch():
    """The loss of the second update alone is NaN, and no gradient is."""

    def loss_fn(model, batch):
        loss, aux = toy_loss(model, ONE)
        return loss + batch.mean(), aux

    hook, step = fl.every(steps=4)(halt_on_nonfinite(4)), fl.pipeline()(loss_fn)
    loaders, every = [ONE, BAD, ONE, ONE, ONE], fl.every(steps=1)
    state = fit(hook, loaders=loaders, step=step, record_every=every)
    assert [math.isnan(loss) for loss in state.history["recent/loss"]] == [0, 1, 0, 0]
    assert (state.step, state.stop) == (4, reason("between steps 2 and 4"))


def test_the_interval_covers_the_steps_that_it_has_not_seen():
    state = fit(fl.every(epochs=2)(halt_on_nonfinite()), loaders=[ONE, BAD, ONE], epochs=3)
    assert math.isnan(state.history["train/loss"][0])
    assert state.stop == reason("between steps 1 and 6")
    loaders = [ONE, BAD, ONE, ONE]
    state = fit(loaders=loaders, steps=3)  # no hook checks step 2
    state = fit(halt_on_nonfinite(2), loaders=loaders, state=state, epochs=1)
    assert state.stop == reason("between steps 1 and 4")
    epochs = iter([[ONE, ONE], [ONE, BAD, ONE], [ONE]])  # it begins after the last epoch
    state = fit(halt_on_nonfinite(), loaders=lambda: next(epochs), epochs=3)
    assert (state.epoch, state.stop) == (2, reason("between steps 3 and 5"))


def test_an_infinite_loss_of_training_halts_the_run_and_no_loss_of_evaluation_does():
    state = fit(halt_on_nonfinite(), loaders=[math.inf * ONE], state=toy(w=1.0))
    assert state.stop == reason("at step 1", value="inf")
    loaders = {"train": [ONE] * 5, "valid": [BAD]}
    state = fit(halt_on_nonfinite(2), loaders=loaders, epochs=2)
    assert (state.epoch, state.stop) == (2, None)
    assert fl.fit(STEP, toy(), [BAD], epochs=2).stop == reason("at step 1")  # a default hook


def test_the_line_of_the_epoch_shows_the_loss_that_halts_a_run(capsys):
    fl.fit(STEP, toy(), [BAD], epochs=2, hooks=(fl.progress(), halt_on_nonfinite()))
    assert "epoch 1/2  step 1  train/loss nan" in capsys.readouterr().err


@pytest.mark.parametrize("keep", [False, True])
def test_it_reads_from_the_device_only_every_n_updates(keep):
    counts = []
    with CountReads() as reads:
        count = lambda state: counts.append(reads.count) or state
        fit(halt_on_nonfinite(3, keep=keep), count, train=7)
    found = [after - before for before, after in itertools.pairwise(counts)]
    assert found == [0, 1, 0, 0, 1, 1]  # at steps 3 and 6, and by the record at 7


# --- keep=True: which update and which samples


def place(epoch, batch, step, indices=None):
    return {"epoch": epoch, "batch": batch, "step": step, "indices": indices}


@pytest.mark.parametrize(("loaders", "settings", "found"), [
    (THIRD, {}, place(0, 2, 3)), (THIRD, {"steps": 2}, place(0, 2, 3)),
    ([BAD, ONE], {}, place(0, 0, 1)), ([ONE, ONE, BAD], {}, place(0, 2, 3)),  # ends an epoch
    ([ONE, ONE, BAD], {"moment": fl.every(epochs=1)}, place(0, 2, 3)),
    ([ONE] * 4 + [BAD, ONE], {"members": (fl.accumulate(2),)}, place(0, 4, 3)),
    ([ONE] * 3 + [BAD], {"members": (fl.accumulate(2),), "steps": 1}, place(0, 2, 2)),
    ([ONE, BAD, ONE], {"evaluate_every": fl.every(steps=1)}, place(0, 1, 2)),
    # of a later epoch
    (lambda epoch, batch: iter([[ONE, ONE], THIRD][epoch][batch:]), {}, place(1, 2, 5)),
    (lambda epoch, batch: iter([[ONE, ONE], THIRD][epoch][batch:]),
        {"steps": 2, "moment": fl.every(steps=2)}, place(1, 2, 5)),
    ([ONE, ONE], {}, None),
])  # fmt: skip
def test_it_names_the_update_that_made_it(loaders, settings, found):
    settings = {"steps": 100, "members": (), "moment": lambda hook: hook} | settings
    hook = settings.pop("moment")(halt_on_nonfinite(settings.pop("steps"), keep=True))
    step = fl.pipeline(*settings.pop("members"))(toy_loss)
    state = fit(hook, loaders=loaders, step=step, epochs=2, **settings)
    assert state.extra.get("nonfinite") == found
    assert found is None or f"at step {found['step']} (epoch {found['epoch']}, " in state.stop


def test_in_a_resumed_run_it_knows_what_it_has_seen(tmp_path):
    state = fit(loaders=THIRD, steps=1)
    state = fit(halt_on_nonfinite(keep=True), loaders=THIRD, state=state)
    back = fl.restore(fl.save(state, tmp_path / "one"), toy())
    assert back.extra["nonfinite"] == state.extra["nonfinite"] == place(0, 2, 3)
    # The run was bad already when the hook began: only the interval is known.
    state = fit(halt_on_nonfinite(keep=True), loaders=THIRD, state=fit(loaders=THIRD, steps=4))
    assert "nonfinite" not in state.extra and "between steps 1 and 5" in state.stop


def test_an_update_that_was_skipped_is_not_the_one():
    batches = [ONE, BAD, ONE, torch.tensor([3e38, 3e38])]
    step = fl.pipeline(fl.skip_nonfinite())(toy_loss)
    state = fit(halt_on_nonfinite(keep=True), loaders=batches, step=step, state=toy(w=1.0))
    assert state.skipped == 2 and "nonfinite" not in state.extra


def test_it_may_raise_and_the_error_has_the_state():
    with pytest.raises(FloatingPointError, match="became nan between steps 1 and 3") as caught:
        fit(halt_on_nonfinite(1, raises=True), loaders=[ONE, ONE, BAD, ONE], state=toy(w=1.0))
    assert (caught.value.state.step, caught.value.state.stop) == (3, None)


@pytest.mark.parametrize(("steps", "halted"), [(1, 9), (4, 9), (5, 12), (10, 12)])
def test_of_several_updates_in_a_call_it_reads_after_each_that_passes_a_multiple(steps, halted):
    loss_fn = lambda model, batch, carry: ((model.w * batch).mean(), {}, torch.zeros(()))
    three = [torch.ones(1, 3)] * 8
    three[2] = three[2] * math.nan  # updates 7 to 9
    hooks = (halt_on_nonfinite(steps=steps),)
    state = fl.fit(fl.pipeline(fl.tbptt(1))(loss_fn), toy(), three, hooks=hooks)
    assert state.step == halted and "the training loss became nan" in str(state.stop)
