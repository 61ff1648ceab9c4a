"""Two machines, as two network namespaces joined by a cable (root on Linux, with ``ip``)."""

import functools
import hashlib
import json
import os
import shutil
import socket
import subprocess
import time

import launch
import pytest
from agents import TORCHRUN, Agent
from joined import logged, rank, said
from process_data import loader
from process_problems import adamw, created, dropping, entropy

import fnloop as fl

pytestmark = pytest.mark.slow

NAMES = f"fnloop-a-{os.getpid()}", f"fnloop-b-{os.getpid()}"  # as tests may run side by side
ADDRESSES = "10.77.0.1", "10.77.0.2"
PORT = 29517
# On the second machine, which gets a name of its own, a folder is another disk.
HIDE = (
    *("unshare", "--mount", "--uts", "sh", "-c"),
    'mount -t tmpfs none "$0" && echo machine-b > /proc/sys/kernel/hostname && exec "$@"',
)


def command(*words, check=True):
    return subprocess.run(words, check=check, capture_output=True, timeout=20)


@functools.cache
def why_not():
    if not hasattr(os, "geteuid") or os.geteuid() or not all(map(shutil.which, ("ip", "unshare"))):
        return "needs root, ip (iproute2) and unshare (util-linux)"
    made = command("ip", "netns", "add", NAMES[0], check=False)
    command("ip", "netns", "del", NAMES[0], check=False)
    return f"has no network namespaces: {made.stderr.decode()}" if made.returncode else None


@pytest.fixture(scope="module")
def machines():
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    try:
        take_apart()
        for name in NAMES:
            command("ip", "netns", "add", name)
        cable = ("ip", "link", "add", "cable-a", "netns", NAMES[0], "type", "veth")
        command(*cable, "peer", "name", "cable-b", "netns", NAMES[1])
        for name, address, end in zip(NAMES, ADDRESSES, ("cable-a", "cable-b"), strict=True):
            command("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            command("ip", "-n", name, "link", "set", end, "up")
            command("ip", "-n", name, "link", "set", "lo", "up")
        yield [("ip", "netns", "exec", name) for name in NAMES]
    finally:
        take_apart()


def take_apart():
    for name in NAMES:
        command("ip", "netns", "del", name, check=False)


def static(n):
    return ("--node-rank", str(n), "--master-addr", ADDRESSES[0], "--master-port", str(PORT))


def c10d(n):
    return (
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"),
        *("--rdzv-conf", f"is_host={int(n == 0)}", "--local-addr", ADDRESSES[n]),
    )


def on_both(machines, folder, job, meet, hide=None):
    agents = []
    try:
        for n, prefix in enumerate(machines):
            hidden = (*HIDE, str(hide)) if hide is not None and n == 1 else ()
            what = (*prefix, *hidden, *TORCHRUN, "--nnodes", "2", *meet(n))
            agents.append(Agent(folder / f"{n}.err", what, job, folder))
        deadline = time.monotonic() + 120
        while any(agent.process.poll() is None for agent in agents):
            assert time.monotonic() < deadline, [agent.written.read_text() for agent in agents]
            time.sleep(0.05)
    finally:
        for agent in agents:
            agent.kill()
    ended = [(agent.process.returncode, agent.written.read_text()) for agent in agents]
    assert not any(code for code, _ in ended), ended
    return [json.loads((folder / f"{n}.json").read_text()) for n in (0, 1)]


def trained(folder):
    """Train, resume and train on. Return checksums of the weights and the history."""
    found, loaders = [], {"train": loader(shuffle=True), "valid": loader(size=7)}
    for epochs in (1, 2):
        state = fl.resume(folder / "saved", created(optimizer=adamw, make=dropping))
        hooks = (fl.every(steps=3)(fl.checkpoint(folder / "saved", keep=2)),)
        step = fl.pipeline(fl.accumulate(total=12), fl.clip(0.5))(entropy)
        state = fl.fit(step, state, loaders, epochs=epochs, hooks=hooks)
        weights = b"".join(p.detach().numpy().tobytes() for p in state.model.parameters())
        metrics = [[one.epoch, one.step, dict(one.metrics)] for one in state.history]
        found.append([state.step, hashlib.sha256(weights).hexdigest(), metrics])
    return found


def unshared(folder):
    found, disk = trained(folder), folder / "disk"
    path = fl.latest(folder / "saved")
    fl.reduce(0.0)  # both have found it
    shutil.copytree(path, disk / f"of {rank()}" / path.name)
    said_of = {
        "resumed, main has it": said(lambda: fl.resume(disk / "of 0", created())),
        "resumed, main has none": said(lambda: fl.resume(disk / "of 1", created())),
        "restored": said(lambda: fl.restore(disk / "of 0" / path.name, created())),
        "restored latest": said(lambda: fl.restore(fl.latest(disk / "of 0"), created())),
    }
    with logged() as said_of["logged"]:
        hooks = (fl.checkpoint(disk / "new"),)
        fl.fit(fl.pipeline()(entropy), created(), loader(), steps=1, hooks=hooks)
    return {"trained": found, "said": said_of, "interface": os.environ.get("GLOO_SOCKET_IFNAME")}


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    one = launch.results(tmp_path_factory.mktemp("one"), 2, trained)
    assert one[0] == one[1] and [step for step, *_ in one[0]] == [4, 8]
    return one


@pytest.mark.long
def test_two_machines_come_to_the_same_bits_as_two_processes(machines, expected, tmp_path):
    assert on_both(machines, tmp_path, trained, c10d) == expected


@pytest.mark.long
def test_machines_that_do_not_share_a_folder_are_told_so(machines, expected, tmp_path):
    disk, step, host = tmp_path / "disk", "step-00000008", socket.gethostname()
    disk.mkdir()
    found = on_both(machines, tmp_path, unshared, static, hide=disk)
    assert [one["trained"] for one in found] == expected
    assert [one["interface"] for one in found] == ["cable-a", "cable-b"]
    advice = (
        ". All machines of a run must share the folder of its checkpoints: mount the same disk "
        "there on each of them, or write the path of a folder on a disk that they share"
    )
    a, b = f"process 0 on {host}", "process 1 on machine-b"
    of_a, of_b = disk / "of 0", disk / "of 1"
    a_sees = f"CheckpointError: {a} sees the checkpoint {of_a / step}, and {b} does not: it has"
    b_sees = f"CheckpointError: {b} sees the checkpoint {of_b / step}, and {a} does not: it has"
    new = f"{disk / 'new'}"
    assert found[0]["said"] == found[1]["said"] == {
        "resumed, main has it": f"{a_sees} no folder {of_a}{advice}",
        "resumed, main has none": f"{b_sees} no folder {of_b}{advice}",
        "restored": f"{a_sees} no folder {of_a}{advice}",
        "restored latest": f"{a_sees} found no checkpoint{advice}",
        "logged": [
            f"checkpoint: {a} writes to {new}; {b} does not see it: it has no folder {new}. "
            f"Without it, a job that is restarted cannot be resumed{advice}"
        ],
    }  # fmt: skip
