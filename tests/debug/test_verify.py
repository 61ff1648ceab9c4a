"""verify: spans of a run are made again, and what was changed in it is found and named."""

import random
import shutil

import attrs
import pytest
import several
import test_laws as laws
import torch
from crafted import craft
from loop_cases import generators
from replayed import recorded
from safetensors.torch import load_file, save_file
from sample_hooks import stop_at
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop._extensions.checkpoints import files
from fnloop.debug import verify
from fnloop.testing import assert_same, small, stochastic, toy, toy_loss

# --- a run with all that a checkpoint has: eight updates in two epochs, saved after each second one

SAVED = (0, 2, 4, 6, 8)


def loss_fn(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def other_loss(model, batch):
    return nn.functional.mse_loss(model(batch[0]), batch[1]) * (1 + 1e-6)


def numbers(changed=0.0):
    torch.manual_seed(1)
    x, y = torch.randn(32, 3), torch.randn(32, 1)
    x[17, 1] += changed
    return TensorDataset(x, y)


def loaders(data=None, **settings):
    settings = {"batch_size": 4, "shuffle": True, **settings}
    valid = DataLoader(numbers(), batch_size=16)
    return {"train": DataLoader(data or numbers(), **settings), "valid": valid}


def created():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 1))
    return fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=0.01), seed=5)


def step_of(loss=loss_fn, decay=0.9):
    return fl.pipeline(fl.accumulate(2), fl.ema(decay), fl.timings())(loss)


def trained(folder, *hooks):
    moment = fl.at_start() | fl.every(steps=2)
    saves = moment(fl.checkpoint(folder, keep=None))
    recent, hooks = fl.every(steps=1), (*hooks, saves)
    return fl.fit(step_of(), created(), loaders(), epochs=2, hooks=hooks, record_every=recent)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(folder)
    return folder


def test_all_spans_of_a_run_hold_at_the_cost_of_their_updates(run, monkeypatch):
    """Each has two updates of two batches. The generators and the state stay as they are."""
    calls = []

    def counted(model, batch):
        calls.append(model.training)
        return loss_fn(model, batch)

    monkeypatch.setattr(random.SystemRandom, "sample", lambda self, all, n: [*all][len(all) - n :])
    state, data, drawn = created(), loaders(), generators()
    report = verify(run, step_of(counted), state, data, spans=3)
    assert [(span.start, span.stop) for span in report.spans] == [(2, 4), (4, 6), (6, 8)]
    assert report.ok and all(span.holds for span in report.spans)
    assert calls.count(True) == 3 * 2 * 2 and calls.count(False) == 2 * 2 * 2, "two evaluations"
    assert {*report.changed} == {"step", counted.__qualname__}
    assert generators() == drawn
    assert_same(state, created())
    fl.snapshot(state)  # it is not stale
    for spans, count in ((0, 0), (1, 1), (3, 3), (9, 4), (None, 4)):
        report = verify(run, step_of(), state, loaders(), spans)
        assert report.ok and len(report.spans) == count and not report.changed
    assert "4 of 4 spans hold, bit for bit" in repr(report) and "2 to 4" in report._repr_html_()


# --- planted changes


def at(folder, step):
    return folder / f"step-{step:08d}"


def flip(file, tensor, bit=16, step=4, kind=torch.int32):
    """Flip a bit of a tensor of a checkpoint, and write the matching checksum."""

    def plant(folder):
        path = at(folder, step) / f"{file}.safetensors"
        tensors = load_file(path)
        tensors[tensor].view(-1).view(kind)[:1] ^= 1 << bit
        save_file(tensors, path, metadata={"format": "pt"})
        entry = {"bytes": path.stat().st_size, "sha256": files.disk.checksum_of_file(path)}
        craft(at(folder, step), lambda made: made["files"].update({path.name: entry}))

    return plant


def edit(change, steps=(4,), chained=False):
    """Change the facts of checkpoints, with matching checksums; and digests, if asked for."""

    def change_all(facts):
        change(facts)
        if chained:
            records = files.decode_history(facts["history"])
            facts["digest"] = ""
            for record in records:
                facts["digest"] = files.chain(facts["digest"], files.encode_record(record))

    def plant(folder):
        for step in steps:
            craft(at(folder, step), facts=change_all)

    return plant


def lower(key, place=2):
    """Make a number of a record smaller."""
    return lambda facts: facts["history"][place].update({key: facts["history"][place][key] / 2})


def damage(folder):
    path = at(folder, 4) / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


MIDDLE = {(2, 4), (4, 6)}  # the spans on both sides of step 4
WAS = "step-00000004 was changed: the run comes from step 2 to step {}, but not through it. ".format
AFTER, EDITED = WAS(8), "step-00000004: its records were edited, as "
GROUP = lambda facts: facts["optimizer"]["param_groups"][0]
ROWS = [
    ("weight", flip("model", "0.weight"), MIDDLE, f"{AFTER}model.0.weight: 1 of 12 elements"),
    ("sign", flip("model", "3.bias", 31), MIDDLE, f"{AFTER}model.3.bias: 1 of 1 elements"),
    ("last bit", flip("model", "0.weight", 0, step=8), {(6, 8)}, "model.0.weight: 1 of 12"),
    ("buffer", flip("model", "1.running_mean"), MIDDLE, f"{AFTER}model.1.running_mean"),
    ("moment", flip("optimizer", "0.bias.exp_avg"), MIDDLE, f"{AFTER}optimizer.0.bias.exp_avg"),
    ("average", flip("ema", "0.weight"), MIDDLE, f"{AFTER}ema.0.weight"),
    ("metric", flip("slots", "metrics.loss.total"), {(2, 4)}, f"{WAS(6)}metrics.loss.total"),
    ("generator", flip("slots", "generators.0.numpy.1", step=6), {(4, 6)},
        "step-00000006 was changed: the run comes from step 4 to step 8, but not through it. gen"),
    ("seed", edit(lambda f: f.update(seed=6)), MIDDLE, f"{AFTER}seed: is 6"),
    ("skip", edit(lambda f: f.update(skipped=1)), MIDDLE, f"{AFTER}step: is 4 in one, and 5"),
    ("rate", edit(lambda f: GROUP(f).update(lr=0.02)), MIDDLE, f"{AFTER}optimizer.param_groups"),
    ("frozen", edit(lambda f: f["model"].update(frozen=["0.weight"])), MIDDLE,
        f"{AFTER}model.frozen"),
    ("count", edit(lambda f: f["averages"]["ema"].update(count=9)), MIDDLE, f"{AFTER}averages"),
    ("record", edit(lower("recent/loss")), {(2, 4)},
        f"{EDITED}its digest is not theirs. record 2, step 3: recent/loss is"),
    ("record and digest", edit(lower("recent/loss", 0), chained=True), set(),
        f"{EDITED}those of the checkpoints around it agree. record 0, step 1: recent/loss is"),
    ("new record and digest", edit(lower("recent/loss"), chained=True), {(2, 4)},
        "step-00000004 and step-00000006: the records of one were edited, or the run went back"),
    ("time", edit(lower("seconds"), (8,)), set(), "step-00000008: its records were edited"),
    ("newest", edit(lower("valid/loss", 7), (8,), chained=True), {(6, 8)},
        "record of step 8: valid/loss is"),
    ("all records", edit(lower("recent/loss"), (4, 6, 8), chained=True), {(2, 4)},
        "record of step 3: recent/loss is"),
    ("step of a record", edit(lambda f: f["history"][2].update(step=9), (4, 6, 8), chained=True),
        {(2, 4)}, "record of step 9: is not at a boundary of the run"),
    ("no record", edit(lambda f: f["history"].pop(1), (2, 4, 6, 8), chained=True), {(0, 2)},
        "metrics.recent/loss.total"),
    ("byte", damage, MIDDLE, "is damaged: the checksum of model.safetensors is wrong"),
    ("file", lambda folder: (at(folder, 4) / "ema.safetensors").unlink(), set(),
        "is damaged: ema.safetensors is missing"),
]  # fmt: skip


@pytest.mark.parametrize(("plant", "fails", "named"), [row[1:] for row in ROWS],
    ids=[row[0] for row in ROWS])  # fmt: skip
def test_a_change_of_a_checkpoint_is_found_and_named(plant, fails, named, run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    plant(folder)
    report = verify(folder, step_of(), created(), loaders(), spans=None)
    assert not report.ok and not report.changed
    assert {(span.start, span.stop) for span in report.spans if not span.holds} == fails
    texts = (*report.faults, *(f"{span.name}: {span.text}" for span in report.spans))
    assert any(named in text for text in texts), report
    untrained = verify(folder, step_of(), created(), loaders(), spans=0)
    found = any(word in named for word in ("the records of", "records were edited", "damaged"))
    assert untrained.ok is not found and not untrained.spans


# --- what else makes another run


def touched(state):
    with torch.no_grad():
        state.model[0].weight[0, 0] += 2**-10
    return state


def from_hook(hook):
    return fl.when(lambda state: state.step == 3)(hook)


ALL = {(0, 2), (2, 4), (4, 6), (6, 8)}
OTHERS = [
    ("loss function", {"step": step_of(other_loss)}, ALL, {"step", "loss_fn", "other_loss"}, 1),
    ("setting", {"step": step_of(decay=0.8)}, ALL, {"step"}, None),
    ("order", {"loaders": loaders(shuffle=False)}, ALL, set(), 1),
    ("batch size", {"loaders": loaders(batch_size=8)}, ALL, set(), 1),
    ("sample", {"loaders": loaders(numbers(2**-10))}, {(2, 4), (6, 8)}, set(), None),
]  # fmt: skip


@pytest.mark.parametrize(("given", "fails", "changed", "update"), [row[1:] for row in OTHERS],
    ids=[row[0] for row in OTHERS])  # fmt: skip
def test_another_script_is_not_taken_for_a_changed_checkpoint(given, fails, changed, update, run):
    given = {"step": step_of(), "loaders": loaders(), **given}
    report = verify(run, given["step"], created(), given["loaders"], spans=None)
    assert {(span.start, span.stop) for span in report.spans if not span.holds} == fails
    assert ({*report.changed}, report.faults) == (changed, ())
    assert update in (None, report.spans[0].update)


def test_what_a_hook_changed_is_in_one_span_and_the_hook_is_named(tmp_path):
    trained(tmp_path, fl.when(lambda state: state.step == 3)(touched))
    report = verify(tmp_path, step_of(), created(), loaders(), spans=None)
    assert [span.holds for span in report.spans] == [True, False, True, True]
    assert (report.spans[1].update, report.faults) == (4, ())
    assert repr(report).endswith("what they change is not made again: touched")


def test_an_inserted_batch_is_in_one_span(tmp_path):
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(tmp_path, keep=None))
    state = fl.fit(step_of(), created(), loaders(), steps=2, hooks=(saves,))
    state, _ = step_of()(state, [*loaders()["train"]][:1])
    fl.fit(step_of(), state, loaders(), epochs=2, hooks=(saves,))
    report = verify(tmp_path, step_of(), created(), loaders(), spans=None)
    assert [(s.stop, s.holds, s.name) for s in report.spans][:3] == [
        (2, True, ""), (4, False, "epoch"), (6, True, "")
    ]  # fmt: skip
    assert not report.faults


def test_on_another_device_the_largest_difference_is_given_and_no_checkpoint_accused(run, tmp_path):
    """A weight is other by a known amount, in a checkpoint that a GPU is said to have made."""
    folder = shutil.copytree(run, tmp_path / "run")

    def elsewhere(facts):
        facts["made_with"]["device"] = "NVIDIA H100"

    flip("model", "3.bias", 31)(folder)
    edit(elsewhere, SAVED)(folder)
    report = verify(folder, step_of(), created(), loaders(), spans=None)
    assert not report.ok and not report.faults and {*report.changed} == {"device"}
    bias = load_file(at(folder, 4) / "model.safetensors")["3.bias"].item()
    assert report.spans[1].difference.largest == abs(2 * bias)
    text = (
        "2 of 4 spans hold, bit for bit. Bits may differ here: device was NVIDIA H100, and is cpu"
    )
    assert text in repr(report) and f"difference is {report.largest:.3g}" in repr(report)


# --- kinds of runs


def again(folder, step, make, given, saved=(0, 2, 5), **settings):
    """Train and verify. Return the report."""
    settings = {"epochs": 2, **settings}
    recorded(folder, step, make(), given, saved, **settings)
    return verify(folder, step, make(), given, spans=None)


def exact():
    state = small().state()
    return fl.TrainState.create(state.model, state.optimizer, seed=5, exact=True)


def of(pipe, problem):
    return pipe(problem.loss_fn), problem.state, problem.batches


def with_valid(pipe, problem):
    step, make, batches = of(pipe, problem)
    return step, make, {"train": batches, "valid": batches[:2]}


EVERY = {"record_every": fl.every(steps=1), "evaluate_every": fl.every(steps=3)}
KINDS = {
    "dropout": (*with_valid(fl.pipeline(fl.grad_norm()), stochastic()), {}),
    "fp16": (*of(fl.pipeline(fl.amp("fp16", init_scale=2.0**17, growth_interval=3),
        fl.accumulate(2)), laws.single_precision(small())), {}),
    "accumulation": (*with_valid(fl.pipeline(fl.accumulate(2), fl.clip(0.1)), small()), {}),
    "ema": (*with_valid(fl.pipeline(fl.ema(0.9), fl.swa(0.5)), stochastic()), EVERY),
    "alternate": (*of(fl.pipeline(fl.ema(0.9)), several.alternating(**laws.EACH[1])), {}),
    "exact": (fl.pipeline(fl.ema(0.9))(small().loss_fn), exact, small().batches, EVERY),
    "plateau": (*with_valid(
        fl.pipeline(fl.plateau("valid/loss", patience=1, mode="max")), small()), EVERY),
    "schedule": (*of(fl.pipeline(fl.schedule(fl.schedules.cosine(warmup=0.1))), small()), EVERY),
    "measured": (*with_valid(fl.pipeline(fl.timings(), fl.throughput()), small()), {"hooks": (
        fl.measure(lambda state: {"m": 1.0}, name="own", every=fl.every(steps=3)),)}),
    "gone back": (*with_valid(laws.SPIKES[1], small()), {"evaluate_every": fl.every(steps=3)}),
    "skipped": (fl.pipeline(fl.skip_nonfinite())(toy_loss), toy,
        [torch.tensor([x]) for x in (1.0, float("nan"), 2.0, 3.0, float("nan"))], {}),
    "stopped": (*of(fl.pipeline(), small()), {"hooks": (stop_at(7), fl.early_stop("train/loss"))}),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_all_spans_hold_of_each_kind_of_run(kind, tmp_path):
    *run, settings = KINDS[kind]
    report = again(tmp_path, *run, **settings)
    assert report.ok and len(report.spans) >= 2, report
    assert not report.changed
    left_out = ["not compared in records: own/m"] if kind == "measured" else []
    assert [note for note in report.notes if "hooks are" not in note] == left_out


def test_spans_of_phases_hold_and_one_in_which_a_phase_began_is_left_out(tmp_path):
    step, make, batches = of(fl.pipeline(fl.schedule(fl.schedules.cosine())), small())
    saves, state = fl.every(steps=3)(fl.checkpoint(tmp_path, keep=None)), make()
    state = fl.fit(step, state, batches, phase="head", hooks=(saves,))
    state = fl.freeze(state, "0.*")
    fl.fit(step, state, batches, phase="all", epochs=2, hooks=(saves,))
    report = verify(tmp_path, step, make(), batches, spans=None)
    assert report.ok and [(s.start, s.stop) for s in report.spans] == [
        (3, 6), (6, 7), (9, 12), (12, 15), (15, 18), (18, 21)
    ]  # fmt: skip
    left_out = "left out: the phase 'all' began within steps 7 to 9, and what the script changed"
    assert report.notes[0].startswith(left_out)


@pytest.mark.slow
def test_spans_of_a_run_with_workers_hold(tmp_path):
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, i):
            return torch.rand(3), torch.tensor([i / 12])

    given = {"train": DataLoader(Noisy(), batch_size=3, shuffle=True, num_workers=2)}
    assert again(tmp_path, step_of(), created, given, (0, 2, 3)).ok


# --- a run whose code was mended since: batches 1, 2, 3 and 4, of which 3 and 4 met the bug


def named(function):
    function.__name__ = function.__qualname__ = "loss"
    return function


@named
def buggy(model, batch):
    return toy_loss(model, batch)[0] * (2 if batch.item() > 2 else 1)


@named
def mended(model, batch):
    return toy_loss(model, batch)[0]


FOUR = [torch.tensor([x]) for x in (1.0, 2.0, 3.0, 4.0)]


def made_by(folder, *losses, begins=True, steps=1):
    """Make an epoch with each of the loss functions in turn, as a script that is edited does."""
    moment = fl.at_start() | fl.every(steps=steps) if begins else fl.every(steps=steps)
    saves = moment(fl.checkpoint(folder, keep=None))
    for epoch, loss in enumerate(losses):
        state = fl.resume(folder, toy())
        fl.fit(fl.pipeline()(loss), state, FOUR, epochs=epoch + 1, hooks=(saves,))


def test_hooks_after_the_one_that_saves_change_nothing(tmp_path):
    """At the end of an epoch a checkpoint has the generators of NumPy for those alone."""
    saves = fl.every(epochs=1)(fl.checkpoint(tmp_path, keep=None))
    hooks = saves, fl.early_stop("train/loss", patience=9)
    fl.fit(fl.pipeline()(toy_loss), toy(), FOUR, epochs=3, hooks=hooks)
    report = verify(tmp_path, fl.pipeline()(toy_loss), toy(), FOUR, spans=None)
    assert report.ok and len(report.spans) == 2


MENDED = "the function loss has other code"


def test_updates_of_code_that_has_changed_are_named_and_made_again(tmp_path):
    """The bug was mended after the first epoch: its last two updates would have other bits."""
    made_by(tmp_path, buggy, mended)
    step = fl.pipeline()(mended)
    report = verify(tmp_path, step, toy(), FOUR, spans="changed")
    assert [(t.start, t.stop, t.changed) for t in report.touched] == [(0, 4, (MENDED,))]
    assert [(s.start, s.stop, s.holds) for s in report.spans] == [
        (0, 1, True), (1, 2, True), (2, 3, False), (3, 4, False)
    ]  # fmt: skip
    assert not report.ok and not report.faults
    line = "Steps 0 to 4 were made before that: 2 of 4 spans made again would have the same bits"
    assert f"changed: {MENDED}. {line} today" in repr(report)
    assert repr(report).count(MENDED) == 1
    report = verify(tmp_path, step, toy(), FOUR, spans=0)
    assert report.ok and [(t.start, t.stop) for t in report.touched] == [(0, 4)]
    assert "made before that, and none of them was made again" in repr(report)


def test_stretches_of_a_run_with_other_changes_are_told_apart(tmp_path):
    """Checkpoints of every second step: with the middle epoch's code, the others are touched."""
    made_by(tmp_path, mended, buggy, mended, begins=False, steps=2)
    report = verify(tmp_path, fl.pipeline()(buggy), toy(), FOUR, spans="changed")
    assert [(t.start, t.stop) for t in report.touched] == [(0, 4), (8, 12)]
    assert [(s.start, s.stop, s.holds) for s in report.spans] == [
        (2, 4, False), (8, 10, True), (10, 12, False)
    ]  # fmt: skip


def test_of_a_run_whose_code_has_not_changed_nothing_is_made_again(tmp_path):
    made_by(tmp_path, mended)
    report = verify(tmp_path, fl.pipeline()(mended), toy(), FOUR, spans="changed")
    assert report.ok and not report.spans and not report.touched
    assert "no update was made by code that has changed since" in repr(report)
    file = at(tmp_path, 2) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    report = verify(tmp_path, fl.pipeline()(mended), toy(), FOUR, spans="changed")
    assert len(report.faults) == 1, "all files are read where no span is"


def test_the_beginning_of_a_run_has_no_update_that_other_code_could_have_made(tmp_path):
    made_by(tmp_path, mended)
    edit(lambda facts: facts["versions"].update(torch="1.0"), (0,))(tmp_path)
    report = verify(tmp_path, fl.pipeline()(mended), toy(), FOUR, spans="changed")
    assert not report.touched and not report.spans and {*report.changed} == {"torch"}


def test_another_setting_or_version_is_a_change_of_code_and_another_device_is_not(tmp_path):
    made_by(tmp_path, mended)
    edit(lambda facts: facts["versions"].update(torch="1.0"), (3, 4))(tmp_path)
    edit(lambda facts: facts["made_with"].update(device="cpu of another"), (1, 2))(tmp_path)
    report = verify(tmp_path, fl.pipeline()(mended), toy(), FOUR, spans="changed")
    change = f"torch was 1.0, and is {torch.__version__}"
    assert [(t.start, t.stop, t.changed) for t in report.touched] == [(2, 4, (change,))]
    assert report.ok and len(report.spans) == 2 and {*report.changed} == {"torch", "device"}
    other = fl.pipeline(fl.clip(9.0))(mended)
    report = verify(tmp_path, other, toy(), FOUR, spans="changed")
    assert [(t.start, t.stop) for t in report.touched] == [(0, 2), (2, 4)]
    assert not any(s.holds for s in report.spans), "there is a metric more, the norm"
    assert [len(t.changed) for t in report.touched] == [1, 2]
    with pytest.raises(ValueError, match='or None for all, or "changed"; got'):
        verify(tmp_path, other, toy(), FOUR, spans="all")


# --- where checkpoints are, and what they lack


@pytest.mark.parametrize("spans", [0, 1, None])
def test_a_run_at_an_address_is_verified_with_the_files_that_it_needs(
    spans, run, tmp_path, monkeypatch
):
    pytest.importorskip("fsspec")
    monkeypatch.setenv("FNLOOP_CACHE", str(tmp_path / "cache"))
    address = f"memory://verified-{spans}"
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(address, keep=None))
    fl.fit(step_of(), created(), loaders(), epochs=2, hooks=(saves,))
    report = verify(address, step_of(), created(), loaders(), spans)
    assert report.ok and len(report.spans) == {0: 0, 1: 1, None: 4}[spans]
    copies = [*tmp_path.rglob("copies/step-*/model.safetensors")]
    assert len(copies) == {0: 5, 1: 2, None: 5}[spans]


def test_what_the_script_does_not_evaluate_is_not_compared_and_named(run):
    report = verify(run, step_of(), created(), loaders()["train"], spans=None)
    assert report.ok and report.notes == ("not compared in records: valid/loss, valid/ema/loss",)


def test_checkpoints_of_older_versions_say_less(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")

    def strip(facts):
        del facts["digest"], facts["made_with"]

    edit(strip, SAVED)(folder)
    report = verify(folder, step_of(other_loss), created(), loaders(), spans=None)
    assert not report.changed and not any(span.holds for span in report.spans)
    assert verify(folder, step_of(), created(), loaders(), spans=None).ok


def test_a_run_that_was_resumed_is_verified_as_one(tmp_path):
    saves = fl.every(steps=2)(fl.checkpoint(tmp_path, keep=None))
    for steps in (3, 5):
        state = fl.resume(tmp_path, created())
        fl.fit(step_of(), state, loaders(), epochs=2, steps=steps, hooks=(saves,))
    report = verify(tmp_path, step_of(), created(), loaders(), spans=None)
    assert report.ok and [span.stop for span in report.spans] == [3, 4, 5]


# --- what is refused


@pytest.mark.parametrize(("given", "error", "message"), [
    ({"spans": -1}, ValueError, "verify expects spans as an int >= 0"),
    ({"step": loss_fn}, TypeError, r"write verify\(folder, pipeline\(\)\(loss_fn\), \.\.\.\)"),
    ({"step": small().state()}, TypeError, r"verify\(folder, step, state, \.\.\.\)"),
    ({"state": small().state()}, fl.CheckpointError, "another model"),
    ({"folder": "none"}, fl.CheckpointError, "none does not exist. Checkpoints are written by fit"),
    ({"folder": "step-00000004"}, ValueError, "there is no pair of neighbouring checkpoints"),
])  # fmt: skip
def test_what_cannot_be_verified_is_refused_with_the_reason(given, error, message, run):
    given = {"step": step_of(), "state": created(), "spans": 1, **given}
    folder = run / given.pop("folder", "")
    with pytest.raises(error, match=message):
        verify(folder, loaders=loaders(), **given)


def test_another_number_of_processes_cannot_make_it_again(run):
    state = created()
    state = attrs.evolve(state, backend=attrs.evolve(state.backend, data_size=2))
    with pytest.raises(ValueError, match="steps 0 to 2 were made on 1 process, and here are 2"):
        verify(run, step_of(), state, loaders())
    assert verify(run, step_of(), state, loaders(), spans=0).ok


class Row(nn.Module):
    def __init__(self, n=1):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(n))


def test_a_span_in_which_a_hook_changed_shapes_is_named_with_both(tmp_path):
    """The state is that of the script, and takes the shapes of each checkpoint."""

    def grow(state):
        if state.step == 2:
            state.model.w = nn.Parameter(torch.zeros(2))
            state.optimizer.param_groups[0]["params"] = [state.model.w]
        return state

    def created():
        model = Row()
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0), seed=0)

    step, ones = fl.pipeline()(lambda model, x: (model.w * x).sum()), [torch.ones(1)] * 4
    saves = fl.every(steps=1)(fl.checkpoint(tmp_path, keep=None))
    fl.fit(step, created(), ones, hooks=(grow, saves))
    state = created()
    report = verify(tmp_path, step, state, ones, spans=None)
    assert [span.holds for span in report.spans] == [False, True, True]
    wrong = report.spans[0]
    assert wrong.name == "model.w"
    assert wrong.text == "shape (2,) in one, and (1,) in the other"
    assert "hooks are not called" in str(report) and state.model.w.shape == (1,)
    update = fl.debug.replay(tmp_path, step, created(), ones, update=4)
    assert update.confirmed
