"""Checkpoints of sharded models: each process writes and reads its own parts.

The environment variable FNLOOP_KILLS, 15 by default, scales how many processes are killed.
"""

import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
import time
import warnings
from pathlib import Path
from unittest.mock import patch

import launch
import pytest
import torch
import torch.distributed as dist
from joined import COUNTS, flat, join, rank, said, whole, world
from killed_run import die_before_operation
from launch import reads, written_by
from process_data import loader
from process_problems import adamw, created
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import fnloop as fl
from fnloop._backend.fsdp import local_part
from fnloop._extensions.checkpoints import files
from fnloop._extensions.checkpoints.format import Slices

pytestmark = pytest.mark.slow

write_files = files.write_files
KILLS = int(os.environ.get("FNLOOP_KILLS", "15"))


class Parts(nn.Module):
    """Parameters tied, frozen, complex, in bf16, whole, and with rows that do not divide."""

    def __init__(self, fill=None):
        super().__init__()
        self.first, self.tied = nn.Linear(4, 5), nn.Linear(4, 5, bias=False)
        self.tied.weight = self.first.weight
        self.norm, self.frozen = nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.frozen.requires_grad_(False)
        self.waves = nn.Linear(3, 7, dtype=torch.complex128)
        self.small = nn.Linear(3, 2, dtype=torch.bfloat16)
        self.register_buffer("empty", torch.zeros(0, 3))
        with torch.no_grad():
            for i, tensor in enumerate((*self.parameters(), *self.buffers())):
                numbers = torch.arange(1.0, 1 + tensor.numel()) + 100 * i
                tensor.copy_(numbers.view(tensor.shape) if fill is None else fill)


def sharded(model, columns=False):
    place = None
    if columns and world() == 2:  # torch splits other dimensions only evenly
        from torch.distributed.tensor import Shard

        place = lambda p: Shard(1) if p.ndim == 2 and p.shape[1] == 4 else None
    for part in (model.waves, model.small):
        fully_shard(part)
    fully_shard(model, shard_placement_fn=place)
    return model


def state_of(shard, fill=None, columns=False):
    model = Parts(fill)
    model = sharded(model, columns) if shard and world() > 1 else model
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=0.1, foreach=False)
    return fl.TrainState.create(model, optimizer, seed=0)


MOMENTS = {"exp_avg": 1, "exp_avg_sq": 2}


def updated(state, moments=MOMENTS):
    """Give the optimizer moments that are known: the weights, and twice the weights."""
    for p in state.optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p) if not moments else torch.zeros_like(p)
    state.optimizer.step()
    state.optimizer.zero_grad()
    with torch.no_grad():
        for p, kept in state.optimizer.state.items():
            kept |= {name: factor * p.detach() for name, factor in moments.items()}
    return state


def numbers(state):
    names = {id(p): name for name, p in state.model.named_parameters()}
    found = {f"model.{k}": plain(v) for k, v in state.model.state_dict().items()}
    for p, kept in state.optimizer.state.items():
        found |= {f"{names[id(p)]}.{key}": plain(value) for key, value in kept.items()}
    return found


def plain(tensor):
    tensor = whole(tensor.detach())
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return [str(tensor.dtype), *tensor.double().flatten().tolist()]


def saves(folder):
    join()
    found = {}
    for kind in ("rows", "columns"):
        state = updated(state_of(True, columns=kind == "columns"))
        fl.save(state, folder / kind)
        found[kind] = numbers(state)
    fl.save(state, folder / "model", only=("model",))
    fl.save(state, folder / "trained", only=("trained",))
    return found


@reads(saves, COUNTS)
def restores(folder):
    """Restore what 1, 2 and 3 processes saved; count the bytes that are read of what was split."""
    join()
    read, copy = [], Slices._copy

    def counting(self, piece, where, target):
        read.append(target.nbytes)
        copy(self, piece, where, target)

    Slices._copy = counting
    found = {}
    for n in COUNTS:
        saved = written_by(saves, n, folder)
        for kind in ("rows", "columns"):
            for shard in (False, True):
                state = fl.restore(saved / kind, state_of(shard, 0.0))
                found[f"{kind} of {n}, {shard}"] = numbers(state)
                same = {type(v) for kept in state.optimizer.state.values() for v in kept.values()}
                split = shard and world() > 1
                found[f"{kind} of {n}, {shard}: kinds"] = len(same) == 1 + split
        read.clear()
        fl.restore(saved / "rows", state_of(True, 0.0))
        found[f"bytes of {n}"] = sum(read)
        for part, shard in itertools.product(("model", "trained"), (False, True)):
            state = fl.restore(saved / part, state_of(shard, 0.0), only=(part,))
            found[f"{part} of {n}, {shard}"] = numbers(state)
    return found


def expected():
    return json.loads(json.dumps(numbers(updated(state_of(False)))))


@pytest.mark.parametrize("n", COUNTS)
def test_each_process_restores_what_any_number_has_saved_bit_for_bit(launched, n):
    right = expected()
    for saved_on, kind, shard in itertools.product(COUNTS, ("rows", "columns"), (False, True)):
        assert all(found["rows"] == right for found in launched(saves, saved_on))
        for found in launched(restores, n):
            name = f"{kind} of {saved_on}, {shard}"
            assert found[name] == right and found[f"{name}: kinds"], name
    learning = dict(Parts().named_parameters(remove_duplicate=False))
    for found, saved_on in itertools.product(launched(restores, n), COUNTS):
        for part, shard in itertools.product(("model", "trained"), (False, True)):
            mine = found[f"{part} of {saved_on}, {shard}"]
            for key in (key for key in right if key.startswith("model.")):
                trained = key.removeprefix("model.") in learning and "frozen" not in key
                same = trained or part == "model" or key == "model.empty"
                assert (mine[key] == right[key]) is same, (part, key)


def test_a_process_reads_only_its_parts(launched):
    one = launched(restores, 1)[0]
    every = sum(one[f"bytes of {n}"] for n in (2, 3)) / 2
    for n, most in ((2, 0.75), (3, 0.65)):
        for mine, saved_on in itertools.product(launched(restores, n), COUNTS):
            assert 0 < mine[f"bytes of {saved_on}"] < every * most


@pytest.mark.parametrize("n", COUNTS[1:])
def test_safetensors_and_the_index_are_enough_to_read_it(launched, tmp_path_factory, n):
    right = launched(saves, n)[0]
    folder = shared_folder(tmp_path_factory) / launch.name_of(saves, n)
    for kind in ("rows", "columns"):
        path = folder / kind
        index = json.loads((path / "index.json").read_text())
        assert not (path / "model.safetensors").exists()
        loaded = {}
        for group, entries in index.items():
            for name, entry in entries.items():
                parts = [load_file(path / s["file"])[s["key"]] for s in entry["shards"]]
                found = torch.cat(parts, entry["dim"]) if "dim" in entry else parts[0]
                assert list(found.shape) == entry["shape"]
                assert str(found.dtype) == f"torch.{entry['dtype']}"
                loaded[name if group == "optimizer" else f"{group}.{name}"] = plain(found)
        assert {key: loaded[key] for key in right[kind]} == right[kind]
        model = index["model"]
        assert model["tied.weight"]["shards"] == model["first.weight"]["shards"]
        paths = [path / f"model-0000{i}-of-0000{n}.safetensors" for i in range(1, n + 1)]
        contents = [load_file(path) for path in paths]
        assert "empty" in contents[0]
        assert not any("norm.running_mean" in found for found in contents[1:])
        assert [c["first.weight"].numel() for c in contents if "first.weight" in c] != [20]


def shared_folder(tmp_path_factory):
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


# --- jobs of two processes


def pairs(folder):
    join()
    return {
        "memory": memory(folder / "memory"),  # before anything else has memory to reuse
        "faults": faults(folder / "faults"),
        "background": background(folder / "background"),
        "killed": [mortal(folder / str(kind), 0, 0, kind) for kind in (False, True)],
    }


# --- faults


names_in = lambda folder: sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def full(*_):
    raise OSError(28, "No space left on device")


def faults(folder):
    first, path = updated(state_of(True)), folder / "saved" / "a"
    fl.save(first, path)
    found, right, other = {}, numbers(first), state_of(True, 7.0)
    for who in range(world()):
        with patch.object(files, "write_files", full if rank() == who else write_files):
            found[f"{who} cannot write"] = said(lambda: fl.save(other, path))
        dist.barrier()
        found[f"{who} cannot write: left"] = names_in(path.parent)
        with patch.object(Slices, "read", full if rank() == who else Slices.read):
            found[f"{who} cannot read"] = said(lambda: fl.restore(path, other))
    unchanged = numbers(other)
    damaged = path.parent / "damaged"
    for name in names_in(path):
        if rank() == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(path, damaged)
            data = bytearray((damaged / name).read_bytes())
            data[-2] ^= 1
            (damaged / name).write_bytes(data)
        dist.barrier()
        found[f"damaged {name}"] = said(lambda: fl.restore(damaged, other))
        dist.barrier()
    fl.save(untied(), path.parent / "untied", only=("model",))
    torn = lambda: fl.restore(path.parent / "untied", other, only=("model",))
    found["two values of a tied tensor"] = said(torn)
    found["unchanged"] = numbers(other) == unchanged
    found["kept"] = numbers(fl.restore(path, other)) == right
    return found


def untied():
    """Return a sharded state in which what is tied elsewhere differs in process 1 only."""
    model = Parts()
    model.tied.weight = nn.Parameter(model.first.weight.detach().clone())
    with torch.no_grad():
        model.tied.weight[-1] += 1
    return fl.TrainState.create(
        sharded(model), torch.optim.SGD(model.small.parameters(), lr=0.1), seed=0
    )


def test_a_fault_in_one_process_is_raised_in_all_and_nothing_changes(launched):
    for found in launched(pairs, 2):
        mine = found["faults"]
        for who in (0, 1):
            assert "No space left on device" in mine[f"{who} cannot write"]
            assert "No space left on device" in mine[f"{who} cannot read"]
            assert mine[f"{who} cannot write: left"] == ["a"]
        damaged = {name for name in mine if name.startswith("damaged")}
        assert len(damaged) == 8
        torn = mine["two values of a tied tensor"]
        assert "different values for first.weight, tied.weight" in torn
        assert all(mine[name].startswith("CheckpointError") for name in damaged)
        assert mine["unchanged"] and mine["kept"]


# --- in the background


come = lambda state: flat(state.model.parameters())
squares = lambda model, batch: model(batch[0]).square().mean()


def trained(folder, *hooks, background=True, steps=14, every=2):
    saves = fl.every(steps=every)(fl.checkpoint(folder, keep=1, background=background))
    step, data = fl.pipeline(fl.ema(0.9, evaluate=False))(squares), loader(shuffle=True)
    state = fl.resume(folder, created(True, adamw))
    return fl.fit(step, state, data, steps=steps, epochs=9, hooks=(saves, *hooks))


def schedule_free(folder):
    """Other weights to evaluate than to train: each process writes its part of both."""
    import schedulefree

    join()
    free = lambda ps: schedulefree.SGDScheduleFree(ps, lr=0.1, foreach=False)
    new = lambda: created(True, free)
    step = fl.pipeline()(squares)
    batches = [(torch.full((2, 6), 0.1 * i),) for i in range(4 * world())]
    state = fl.fit(step, new(), batches, steps=2, hooks=())
    before, path = come(state), fl.save(state, folder / "a")
    given = [torch.zeros(1)] * world()
    seen = [*fl.predict(lambda m, _: come(state), state, given, gather=False)]
    found = [come(state) == before, seen[0] != before]
    found.append(come(fl.restore(path, new(), only=("model",))) == seen[0])
    found.append(come(resumed := fl.restore(path, new())) == before)
    one, two = (fl.fit(step, s, batches, steps=4, hooks=()) for s in (state, resumed))
    return [*found, come(one) == come(two)]


def test_weights_to_train_with_are_sharded_as_those_to_evaluate_are(launched):
    pytest.importorskip("schedulefree")
    assert launched(schedule_free, 2) == [[True] * 5] * 2


def background(folder):
    found, seen, release = {}, {}, threading.Event()

    def slow(contents, where):
        release.wait()
        return write_files(contents, where)

    def watch(state):
        if state.step == 5:
            release.set()
        for thread in threading.enumerate() if release.is_set() else ():
            if thread.name == "checkpoint":  # it writes
                thread.join()
        seen[state.step] = [fl.latest(folder / "slow") is not None, come(state)]
        return state

    with patch.object(files, "write_files", slow if rank() == 1 else write_files):
        trained(folder / "slow", watch, every=3)
    found["slow"] = {step: there for step, (there, _) in seen.items()}
    weights = {step: now for step, (_, now) in seen.items()}
    for name in names_in(folder / "slow"):
        restored = fl.restore(folder / "slow" / name, created(True, adamw))
        found["state"] = come(restored) == weights[14]

    with patch.object(files, "write_files", full if rank() == 1 else write_files):
        found["full"] = said(lambda: trained(folder / "full", every=3))
    dist.barrier()
    found["full: left"] = names_in(folder / "full")

    def fail(state):
        if state.step == 4:
            raise ValueError("enough")
        return state

    release.clear()
    timer = threading.Timer(0.5, release.set)  # the process that fails waits for its own writer
    timer.start()
    with patch.object(files, "write_files", slow if rank() == 1 else write_files):
        found["failed"] = said(lambda: trained(folder / "failed", fail, every=3))
    dist.barrier()
    found["failed: left"] = names_in(folder / "failed")
    return found


def test_in_the_background_a_checkpoint_is_complete_when_all_have_written(launched):
    for found in launched(pairs, 2):
        mine = found["background"]
        there = {int(step): seen for step, seen in mine["slow"].items()}
        assert not any(there[step] for step in range(1, 6))
        assert all(there[step] for step in range(9, 15)) and mine["state"]
        assert "No space left on device" in mine["full"]
        assert "ValueError: enough" in mine["failed"]
        for name in ("full", "failed"):
            assert mine[f"{name}: left"] in ([], [".run"]), name


# --- killed


def mortal(folder, who, n, in_background):
    """Train and save; one process dies before its n-th file operation, or none."""
    join()
    seen = {}

    def note(state):
        seen[state.step] = come(state)
        if in_background and state.step % 2:
            time.sleep(0.02)
        return state

    count = die_before_operation(n if rank() == who else 0, folder / "run")
    trained(folder / "run", note, background=in_background, steps=6)
    return [count[0], seen]


@pytest.mark.parametrize("in_background", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_process_killed_while_all_write_leaves_one_whole(launched, tmp_path, in_background):
    whole_run = [found["killed"][in_background] for found in launched(pairs, 2)]
    right = {int(step): numbers for step, numbers in whole_run[0][1].items()}
    rng, seen = random.Random(f"background {in_background}"), []
    step, data = fl.pipeline(fl.ema(0.9, evaluate=False))(squares), loader(shuffle=True)
    for who, i in itertools.product((0, 1), range(max(1, KILLS // 15))):
        folder, n = tmp_path / f"{who} {i}", rng.randint(1, whole_run[who][0])
        killed = launch.launch(folder, 2, mortal, who, n, in_background, forked=True)
        assert killed.codes[who] == -signal.SIGKILL and killed.codes[1 - who], killed.errors
        state = fl.resume(folder / "run", created(False, adamw))  # a warning is an error
        assert state.step in (0, 2, 4, 6)
        assert state.step == 0 or come(state) == right[state.step]
        seen.append((who, n, state.step))
        saves = fl.checkpoint(folder / "run", keep=1)
        fl.fit(step, state, data, steps=state.step + 1, hooks=(saves,))
        assert names_in(folder / "run") == [f"step-{state.step + 1:08d}"]
    print(f"killed (process, before operation, found step): {seen}")
    if KILLS >= 60:
        assert len({step for *_, step in seen}) > 1


# --- memory

LARGE = 8 << 20  # elements


def memory(folder):
    def large():
        layers = [nn.Linear(1024, LARGE // 2048, bias=False) for _ in range(2)]
        return created(True, momentum, lambda: nn.Sequential(*layers))

    momentum = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9)
    first, second = updated(large(), {}), large()
    fl.restore(fl.save(created(True, adamw), folder / "warm"), created(True, adamw))
    share = 2 * 4 * LARGE / world()
    saved = peak(lambda: fl.save(first, folder / "a")) / share
    return saved, peak(lambda: fl.restore(folder / "a", second)) / share


def peak(do):
    """Return by how many bytes the memory of this process grows while it does something."""
    before, most, done = resident(), [0], threading.Event()

    def sample():
        while not done.wait(0.0005):
            most[0] = max(most[0], resident())

    thread = threading.Thread(target=sample)
    thread.start()
    do()
    done.set()
    thread.join()
    return most[0] - before


def resident():
    pages = STATM.read_text().split()[1] if STATM.exists() else 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.exists(), reason="this system has no /proc")
def test_saving_and_restoring_take_little_more_memory_than_the_share_of_a_process(launched):
    for found in launched(pairs, 2):
        saved, restored = found["memory"]
        assert saved < 0.3 and restored < 1.3, f"of a share: {saved:.2f} and {restored:.2f}"


def spoilt(folder):
    """Save a model with NaN in the part of the last process alone, and resume beside a good one."""
    run, found = folder / "spoilt", {}
    state = state_of(True)
    for name, value in (("good", None), ("bad", float("nan")), ("worse", None)):
        if value is not None and rank() == world() - 1:
            with torch.no_grad():
                local_part(state.model.first.weight).fill_(value)
        fl.save(state, run / name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        resumed = fl.resume(run, state_of(True, 0.0))
    found["numbers"] = numbers(resumed)["model.first.weight"]
    found["seen"] = [str(warning.message) for warning in seen]
    found["finite"] = {
        name: json.loads((run / name / "manifest.json").read_text())["finite"]
        for name in ("good", "bad", "worse")
    }
    return found


def test_nan_in_the_part_of_one_process_is_in_the_manifest_of_all(launched):
    for process, found in enumerate(launched(spoilt, 2)):
        assert found["finite"] == {"good": True, "bad": False, "worse": False}
        assert found["numbers"] == ["torch.float32", *map(float, range(1, 21))]
        said = "passed over.*worse are not finite .first.weight in model-00002-of-00002.safetensors"
        assert len(found["seen"]) == (0 if process else 2)
        assert process or re.search(said, found["seen"][0])


def other_shapes(folder):
    def made(rows):
        model = nn.Linear(4, rows)
        fully_shard(model)
        return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=1.0))

    path = fl.save(made(6), f"{folder}/a")
    state = made(8)
    same = fl.restore(path, made(6), shapes="file").model.weight.shape == (6, 4)
    return same, said(lambda: fl.restore(path, state, shapes="file")), [*state.model.weight.shape]


def test_a_sharded_model_takes_no_other_shapes_and_says_so(launched):
    for same, text, shape in launched(other_shapes, 2):
        assert same and shape == [8, 4]
        assert "sharded over processes cannot take other shapes" in text
        assert "weight: (8, 4) here, (6, 4) there" in text and "before it is sharded" in text
