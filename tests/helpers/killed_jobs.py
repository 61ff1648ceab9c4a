"""Jobs that are killed in the middle of something, started again, and compared with whole ones.

A row says what a job is doing: it uploads checkpoints to S3 in the background, it averages weights
with an outer optimizer, or workers of its loader pack sequences. An event is a request to the
server, an average or a step of the outer optimizer, or a batch that a worker packs. A job is killed
before, in or after one of its events: one process, or all. The others have to end with an error.
The job that continues has to reach the same bits, from a checkpoint that is not older than the last
one that was whole before the kill.
"""

import contextlib
import fcntl
import itertools
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import NamedTuple

import launch
import s3
import torch
from joined import COUNTS, rank
from killed_run import digest, facts
from process_data import loader
from process_problems import adamw, created, entropy
from torch import nn
from torch.utils.data import DataLoader

import fnloop as fl
from fnloop._extensions.engines import apart, exchanges
from fnloop.data import bucketed, pack_collate

# Seconds in which the others end. The workers of a killed process hold its connections open until
# they notice that it is gone, for which torch lets them look every 5 s.
LIMIT = 15.0
EPOCHS, EVERY, KEEP = 3, 3, 2  # of a job; updates between checkpoints; and how many of these stay
MOMENTS = ("before", "in", "after")


# --- the jobs


class Bomb:
    """Kills processes at an event of this process or of its workers.

    Args:
        folder: that of the job, with the number of each process.
        number: of the event, from 1; 0 for none.
        moment: before, in or after it.
        victims: the ranks of the processes that are killed.
    """

    def __init__(self, folder, number, moment, victims):
        self.folder, self.victims, self.number, self.moment = folder, victims, number, moment
        self.begun = folder / f"events {rank()}"
        self.begun.touch()

    def count(self):
        return self.begun.stat().st_size

    @contextlib.contextmanager
    def event(self):
        with self.begun.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # workers count together
            file.write(b".")
            moment = self.moment if file.tell() == self.number else None
        if moment == "before":
            kill(self.folder, self.victims)
        if moment == "in":
            later = 0.002 * random.Random(self.number).random()
            threading.Timer(later, kill, (self.folder, self.victims)).start()
        yield
        if moment == "after":
            kill(self.folder, self.victims)


def kill(folder, victims):
    """Kill the processes of some ranks; this one last, if it is one of them."""
    pids = [int((folder / f"pid {victim}").read_text()) for victim in victims]
    (folder / "killed").write_text(str(time.time()))
    for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def uploading(bomb):
    """The link to the server counts the events."""
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), HEAD())
    return fl.pipeline(fl.clip(0.3))(entropy), created(optimizer=adamw, make=model), in_rows()


def averaging(bomb):
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            with bomb.event():
                super().step()

    def counted(*arguments):
        with bomb.event():
            mean(*arguments)

    mean, exchanges.mean_over_processes_ = exchanges.mean_over_processes_, counted
    exchanges.PIECE = 10  # an average takes several messages
    model = lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), HEAD())
    outer = lambda params: Outer(params, lr=0.7, momentum=0.9, nesterov=True)
    step = fl.pipeline(fl.accumulate(2), fl.local_sgd(2, outer))(entropy)
    return step, created(optimizer=adamw, make=model), in_rows()


def packing(bomb):
    def collate(samples):
        with bomb.event():
            return pack(samples)

    pack, sampler = pack_collate(), bucketed([len(d["input_ids"]) for d in DOCUMENTS], max_items=12)
    workers = {"num_workers": 2, "multiprocessing_context": "fork"}
    train = DataLoader(DOCUMENTS, batch_sampler=sampler, collate_fn=collate, **workers)
    valid = DataLoader(DOCUMENTS, batch_size=9, collate_fn=pack)
    return (
        fl.pipeline(fl.clip(0.3))(packed),
        created(optimizer=adamw, make=Tokens),
        {"train": train, "valid": valid},
    )


HEAD = lambda: nn.Linear(8, 3)


def in_rows():
    train = loader(size=2, shuffle=True, drop_last=True)  # BatchNorm takes no batch of one sample
    return {"train": train, "valid": loader(size=5)}


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 8), nn.Embedding(9, 8)
        self.head = nn.Sequential(nn.Dropout(0.3), HEAD())

    def forward(self, batch):
        return self.head(self.tokens(batch["input_ids"]) + self.places(batch["position_ids"]))


def packed(model, batch):
    loss = nn.functional.cross_entropy(model(batch)[0], batch["labels"][0])
    return loss, {"weight": batch["labels"].numel()}


DOCUMENTS = [
    {"input_ids": [(7 * i + j) % 50 for j in range(n)], "labels": [(i + j) % 3 for j in range(n)]}
    for i, n in enumerate(1 + 5 * i % 9 for i in range(41))
]
ROWS = {"uploading": uploading, "averaging": averaging, "packing": packing}


def train(folder, run, row, number, moment, at, victims):
    """Train or resume a job of a row, which a bomb kills at an event of the process ``at``."""
    run = Path(run)
    (folder / f"pid {rank()}").write_text(str(os.getpid()))
    bomb = Bomb(folder, number if rank() == at else 0, moment, victims)
    step, state, loaders = ROWS[row](bomb)
    where = f"s3://{s3.BUCKET}/{run.name}" if row == "uploading" else run / "checkpoints"
    state = fl.resume(where, state)
    (folder / f"began {rank()}").write_text(str(state.step))

    def note(state):
        """Note that the checkpoint before this hook is whole."""
        (run / "saved.new").write_text(str(state.step))
        (run / "saved.new").replace(run / "saved")  # a kill leaves one of the two, whole
        return state

    saves = [fl.checkpoint(where, KEEP, background=row == "uploading")]
    saves += [] if row == "uploading" else [fl.on_main(note)]
    hooks = [fl.every(steps=EVERY)(hook) for hook in saves]
    state = fl.fit(step, state, loaders, epochs=EPOCHS, hooks=hooks)
    return {**come_to(state), "events": bomb.count()}


def come_to(state):
    """Return all that a process has come to, but for times."""
    slot, rows = apart.apart_of(state), [[r.items, r.closing] for r in state.history]
    found = {**facts(state), "rows": rows}
    if slot is not None:
        shared = slot.outer_state()
        moments = [s["momentum_buffer"] for s in shared["outer"]["state"].values()]
        found["own"] = digest(*(slot.own or {}).values())
        found["shared"] = [digest(*shared["shared"].values()), digest(*moments)]
    return found


# --- the check


class Case(NamedTuple):
    """One kill.

    Args:
        row: what the job is doing.
        n: the number of processes.
        every: whether all are killed, or one.
        moment: before, in or after an event.
        share: which event, as a share of all of them.
        at: the rank of the process whose event it is, and which is killed.
        elsewhere: whether it continues without local copies of what was uploaded.
    """

    row: str
    n: int
    every: bool
    moment: str
    share: float
    at: int
    elsewhere: bool

    def __str__(self):
        who = "all" if self.every else f"process {self.at}"
        there = ", continued elsewhere" if self.elsewhere else ""
        return f"{self.row} on {self.n}, {who} {self.moment} {self.share:.3f}{there}"


def cases(kills, seed):
    """Return cases: each row on each number of processes, then again with others killed."""
    rng, cells = random.Random(seed), [*itertools.product(ROWS, COUNTS)]
    found = []
    for turn in range(-(-kills // len(cells))):
        moments = [MOMENTS[i % len(MOMENTS)] for i in range(len(cells))]
        rng.shuffle(moments)
        for i, ((row, n), moment) in enumerate(zip(cells, moments, strict=True)):
            every = n == 1 or (turn + i) % 2 == 0
            drawn = rng.random(), rng.randrange(n), rng.random() < 0.5 and row == "uploading"
            found.append(Case(row, n, every, moment, *drawn))
    return found[:kills]


class Jobs:
    """Jobs whose checkpoints are in a folder, or on a server of S3 that a link leads to.

    Args:
        folder: for all that they write.
        link: the link.
    """

    def __init__(self, folder, link):
        self.folder, self.link, self.whole, self.names = folder, link, {}, itertools.count()

    @classmethod
    @contextlib.contextmanager
    def beginning(cls, folder):
        with s3.s3_server() as port, s3.Link.to(port) as link:
            yield cls(folder, link)

    def start(self, run, n, row, number=0, moment="before", at=0, victims=()):
        """Start a job or continue it, and return its folder, and how its processes ended."""
        folder = run / f"attempt {next(self.names)}"
        variables = {**s3.environment(self.link.port), "FNLOOP_CACHE": str(run / "cache")}
        arguments = str(run), row, number, moment, at, victims
        settings = {"environment": variables, "forked": True, "timeout": 120}
        return folder, launch.launch(folder, n, train, *arguments, **settings)

    def ends(self, run, n, row):
        """Run a job to its end. Return where it began, what it has come to, and its events."""
        self.link.reset()
        folder, found = self.start(run, n, row)
        assert not any(found.codes), "\n---\n".join(found.errors)
        began = {int((folder / f"began {i}").read_text()) for i in range(n)}
        assert len(began) == 1, began
        events = [one.pop("events") for one in found.results]
        if row == "uploading":
            events = [sum(method in CHANGES for method, _ in self.link.seen)] * n
        return began.pop(), found.results, events

    def whole_one(self, row, n):
        """Return what a job that is not killed comes to, and its events."""
        if (row, n) not in self.whole:
            run = self.folder / f"whole-{row}-{n}"
            run.mkdir()
            _, *self.whole[row, n] = self.ends(run, n, row)
        return self.whole[row, n]

    def check(self, case):
        """Kill a job, and continue it.

        Returns:
            How long the last process lived after the kill, and where the job continued.

        Raises:
            AssertionError: a process hung or ended without an error, a checkpoint is gone, or the
                job has come to something else than the whole one.
        """
        row, n = case.row, case.n
        expected, events = self.whole_one(row, n)
        run = self.folder / f"killed-{next(self.names)}"
        run.mkdir()
        number = 1 + int(case.share * events[case.at])
        victims = [*range(n)] if case.every else [case.at]
        lived, promised = self.kill(run, case, number, victims)
        if case.elsewhere:
            shutil.rmtree(run / "cache", ignore_errors=True)
        newest = self.newest(run) if row == "uploading" else step_of(fl.latest(run / "checkpoints"))
        began, found, _ = self.ends(run, n, row)
        assert newest >= promised, f"the checkpoint of step {promised} is gone"
        here = row == "uploading" and not case.elsewhere  # where a copy may be newer
        assert began >= newest if here else began == newest, (began, newest)
        differing = [k for a, b in zip(found, expected, strict=True) for k in a if a[k] != b[k]]
        assert not differing, f"continued from step {began}, it differs in {differing}"
        shutil.rmtree(run)
        return lived, began

    def kill(self, run, case, number, victims):
        """Run a job until it is killed.

        Returns:
            How long the last process lived, and the newest step that was whole at the kill.
        """
        self.link.reset()
        at_link, promised = case.row == "uploading", []
        if at_link:
            self.link.decide = self.decider(run, case, number, victims, promised)
        given = () if at_link else (number, case.moment, case.at, victims)
        _, ended = self.start(run, case.n, case.row, *given)
        if not at_link:
            saved = run / "saved"
            promised.append(int(saved.read_text()) if saved.exists() else 0)
        errors = "\n---\n".join(ended.errors)
        killed = [*run.glob("attempt */killed")]
        assert killed, f"event {number} did not come\n{errors}"
        for process, code in enumerate(ended.codes):
            # A traceback, and not a crash or a signal
            assert code == (-signal.SIGKILL if process in victims else 1), (
                f"event {number}: {ended.codes}\n{errors}"
            )
        lived = max(ended.ended) - float(killed[0].read_text())
        assert lived < LIMIT, f"event {number}: {lived:.1f} s\n{errors}"
        return lived, promised[0]

    def decider(self, run, case, number, victims, promised):
        """Return what kills at a request to change something."""
        begun = itertools.count(1)

        def cut():
            promised.append(self.newest(run))
            (pid, *_) = run.glob("attempt */pid 0")
            kill(pid.parent, victims)

        def decide(method, key):
            if method not in CHANGES or next(begun) != number:
                return None
            if 0 not in victims:  # the process that uploads lives, so its request passes
                cut()
                return None
            return "half" if case.moment == "in" else case.moment

        self.link.cut = cut
        return decide

    def newest(self, run):
        """Return the newest step that is whole on the server; it is asked past the link."""
        import boto3  # not in the processes of jobs

        client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{self.link.target}", **KEYS)
        found = client.list_objects_v2(Bucket=s3.BUCKET, Prefix=f"{run.name}/step-")
        keys = (Path(item["Key"]) for item in found.get("Contents", ()))
        return max((step_of(key.parent) for key in keys if key.name == "manifest.json"), default=0)


CHANGES = ("PUT", "POST", "DELETE")
KEYS = {
    "aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1",
}  # fmt: skip


def step_of(path):
    return 0 if path is None else int(path.name.removeprefix("step-"))
