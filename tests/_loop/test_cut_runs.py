"""A run that is cut anywhere and continued is the run that was not, whatever hooks it has.

The table is of hooks, of when to record and to evaluate, of middleware, of targets, and of what
cuts the run: at every batch, of training and of evaluation, and at every call of a hook.
"""

import itertools

import pytest
from random_programs import Cut, Program, compare, cut_run, quiet, whole_run


def stop_at(step):
    return f"fl.when(lambda s: s.step == {step})(stop('enough'))"


END, EARLY = "fl.at_end()(note('end'))", "fl.early_stop('valid/loss', patience=1)"
END_EPOCH = "fl.when(lambda s: s.batch == 2)(end_epoch())"
HOOKS = {
    "none": (),
    "stop": (stop_at(2), END),
    "stop at an epoch's end": (stop_at(4), "fl.restore_best('valid/loss')"),
    "stop after a skip": ("fl.when(lambda s: s.skipped == 1)(stop('enough'))", END),
    "stop, epoch ended": (END_EPOCH, stop_at(3)),
    "early_stop": (EARLY, "fl.restore_best('valid/loss')", END),
    "restore_best": ("fl.restore_best('valid/loss', 'max')",),
    "ended epochs": (END_EPOCH, "fl.every(epochs=1)(note('note'))"),
    "when_improved": ("fl.when_improved('valid/loss')(note('better'))",),
    "moments": ("fl.at_start()(note('start'))", "fl.every(steps=3)(note('note'))",
                "(fl.every(epochs=2) | fl.at_end())(note('end'))"),
    "inspect": ("fl.inspect(see('see'))", stop_at(6)),
    "inspect the end": ("fl.inspect(see('end see'), every=fl.at_end())", stop_at(3)),
    "numbers of inspect": ("fl.inspect(numbers('ap'), reports=('ap',))",
                           "fl.early_stop('valid/ap', 2, mode='min')"),
    "numbers at the end": ("fl.inspect(numbers('ap'), every=fl.every(epochs=2) | fl.at_end())",
                           "fl.measure(numbers('n'), name='m', every=fl.at_end())"),
    "measure": ("fl.measure(numbers('n'), name='m', every=fl.at_start() | fl.every(steps=2))",
                "fl.early_stop('m/n', 3, mode='min')", END),
    "halt_on_nonfinite": ("fl.halt_on_nonfinite(1)", stop_at(5)),
}  # fmt: skip
RECORDS = "None", "fl.every(steps=1) | fl.every(epochs=1)", "fl.every(steps=2)"
EVALUATIONS = (
    "fl.every(epochs=1)",
    "fl.at_start() | fl.every(steps=2)",
    "{'valid': fl.every(steps=2), 'test': fl.at_end()}",
    "{'valid': fl.every(epochs=1), 'test': fl.every(epochs=2) | fl.at_end()}",
)
TARGETS = {"epochs": 2}, {"steps": 5}, {"epochs": 3, "steps": 6}
MEMBERS = (
    (), ("fl.accumulate(2)", "fl.ema(0.5)"), ("fl.schedule(fl.schedules.linear())",),
    ("fl.plateau('valid/loss', patience=1)",), ("fl.clip(1.0)", "fl.accumulate(2)"),
)  # fmt: skip
POINTS = ("training", "evaluation", "hook")
HOWS = ("kill", "terminate", "press", "fail")
LOADERS = {"valid": "batches(1, first=50)", "test": "batches(1, first=70)"}


def rows():
    """Return two rows for each way to make hooks; the other settings take turns.

    Each row has two of the cuts. One cut of each way is tried at once, and the others are long.
    """
    for n, (turn, name) in enumerate(itertools.product((0, 1), HOOKS)):
        program = Program(
            train="batches(5, skip=(1,))", valid=LOADERS, hooks=HOOKS[name],
            record_every=RECORDS[n % 3], evaluate_every=EVALUATIONS[n % len(EVALUATIONS)],
            members=MEMBERS[n % len(MEMBERS)], fits=(TARGETS[n // 2 % 3],),
        )  # fmt: skip
        first = n % len(HOOKS) + turn
        for i in (first % 4, (first + 2) % 4):
            marks = [] if turn == 0 and i == n % 4 else [pytest.mark.long]
            yield pytest.param(program, HOWS[i], id=f"{name} {n}-{HOWS[i]}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("program", "how"), [*rows()])
def test_a_run_that_is_cut_and_continued_is_the_one_that_was_not(program, how, tmp_path):
    """After a kill and SIGTERM it is continued with new objects, otherwise with the same."""
    through = "disk" if how in ("kill", "terminate") else "memory"
    with quiet():
        whole, world = whole_run(program)
        calls = world.calls
        for at in POINTS[: 2 if how == "fail" else 3]:  # after a hook that failed none is called
            assert world.points[at]
            for n in range(world.points[at]):
                cuts = (Cut(how, at, n, through),)
                found, runs = cut_run(program, cuts, tmp_path / f"{at} {n}")
                compare(cuts, whole, found)
                assert runs[-1] == calls[len(calls) - len(runs[-1]) :], cuts
