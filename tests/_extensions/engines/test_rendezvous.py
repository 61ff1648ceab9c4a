"""The processes of an attempt find each other, and not those of an earlier attempt."""

import os
import time
from datetime import timedelta

import launch
import pytest
import torch.distributed as dist
from joined import rank, world

from fnloop._extensions.engines import launch as processes


@pytest.fixture
def cluster(monkeypatch):
    """One of two machines, whose name has a loopback address only."""
    monkeypatch.setattr(processes.socket, "gethostname", lambda: "127.0.1.1")
    monkeypatch.setattr(processes, "_interface_to", {"10.77.0.1": "eth7"}.get)
    for name, value in (("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)

    def choose(first, **environment):
        for name, value in {"MASTER_ADDR": first, **environment}.items():
            monkeypatch.setenv(name, value)
        processes.choose_interface()
        return os.environ.get("GLOO_SOCKET_IFNAME")

    yield choose
    os.environ.pop("GLOO_SOCKET_IFNAME", None)


def test_gloo_gets_the_interface_between_the_machines(cluster, caplog):
    assert cluster("10.77.0.1") == "eth7"
    del os.environ["GLOO_SOCKET_IFNAME"]
    assert cluster("10.77.0.2") is None
    assert caplog.messages == [
        "the name of this machine, 127.0.1.1, has no address that other machines can reach, and "
        "gloo would listen there: name the network interface between the machines, "
        "GLOO_SOCKET_IFNAME=eth0 torchrun ..."
    ]


def test_what_is_known_to_work_is_left_alone(cluster, monkeypatch):
    assert cluster("127.0.0.1") is None  # the machines are processes on one
    assert cluster("10.77.0.1", LOCAL_WORLD_SIZE="2") is None
    assert cluster("10.77.0.1", LOCAL_WORLD_SIZE="1", GLOO_SOCKET_IFNAME="mine") == "mine"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(processes, "_is_loopback", "127.0.0.9".__eq__)  # all others are reachable
    assert cluster("10.77.0.1") is None


@pytest.mark.parametrize("name", ["192.0.2.1", "no.such.name.invalid"])  # the first is of documents
def test_a_name_without_an_address_of_this_machine_is_unreachable(name):
    assert processes._is_unreachable(name)


def agreeing(folder, stale):
    """Agree on an attempt three times in one store, which has entries of dead processes."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=rank() == 0)
    if stale and rank() == 0:
        keys = dist.PrefixStore("fnloop", store)
        for n in range(world()):  # an attempt that died when all but one had confirmed
            keys.set(f"word of {n}", f"dead {n}")
            keys.set(f"answer to dead {n}", "dead 0")
            keys.set(f"dead 0 confirmed by {n}", "")
        keys.set("dead 0 is complete", "")
        store.set("the dead have written", "")
    if stale:  # what follows is of the running processes
        store.wait(["the dead have written"])
    words = [processes.agree_on_attempt(store, rank(), world()) for _ in range(3)]
    store.add("done", 1)
    while rank() == 0 and store.add("done", 0) < world():
        time.sleep(0.01)
    return words


@pytest.mark.slow
@pytest.mark.parametrize("stale", [False, True])
def test_the_running_processes_agree_on_an_attempt(tmp_path, stale):
    first, *others = launch.results(tmp_path, 3, agreeing, stale)
    assert others == [first, first]
    assert len({*first, "dead 0"}) == 4


class Late:
    """A store in which a follower misses the end of an attempt: the next one begins first."""

    def __init__(self):
        self.store = dist.HashStore()
        self.store.set("answer to mine", "first")

    def __getattr__(self, name):
        return getattr(self.store, name)

    def wait(self, keys, timeout):
        if keys == ["first is complete"]:
            self.store.set("first is complete", "")
            self.store.set("answer to mine", "second")  # the first process sees the old word
            raise dist.DistStoreError("timed out")
        self.store.wait(keys, timedelta(seconds=0.1))


def test_a_process_that_is_late_does_not_take_the_next_attempt_for_this_one():
    store = Late()
    assert processes._follow(store, "mine", 1, time.monotonic() + 5) == "first"
    assert not store.check(["second confirmed by 1"])


@pytest.mark.slow
def test_waiting_for_a_process_that_does_not_join_times_out():
    store, moment = dist.HashStore(), timedelta(seconds=0.1)
    with pytest.raises(TimeoutError, match=r"the processes \[1, 2\] did not join process 0"):
        processes.agree_on_attempt(store, 0, 3, moment)
    with pytest.raises(TimeoutError, match="process 1 has waited for all others to join: find out"):
        processes.agree_on_attempt(store, 1, 3, moment)
