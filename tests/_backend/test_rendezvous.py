"""The processes of an attempt find each other, and not those of an earlier attempt."""

import os
import time
from datetime import timedelta

import launch
import pytest
import torch.distributed as dist
from process_problems import rank, world

from fnloop._backend import rendezvous

pytestmark = pytest.mark.slow


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
    words = [rendezvous.agree_on_attempt(store, rank(), world()) for _ in range(3)]
    store.add("done", 1)
    while rank() == 0 and store.add("done", 0) < world():
        time.sleep(0.01)
    return words


@pytest.mark.parametrize("stale", [False, True])
def test_the_running_processes_agree_on_an_attempt(tmp_path, stale):
    first, *others = launch.results(tmp_path, 3, agreeing, stale)
    assert others == [first, first]
    assert len({*first, "dead 0"}) == 4


def test_waiting_for_a_process_that_does_not_join_times_out():
    store, moment = dist.HashStore(), timedelta(seconds=0.1)
    with pytest.raises(TimeoutError, match=r"the processes \[1, 2\] did not join process 0"):
        rendezvous.agree_on_attempt(store, 0, 3, moment)
    with pytest.raises(TimeoutError, match="process 1 has waited for all others to join: find out"):
        rendezvous.agree_on_attempt(store, 1, 3, moment)
