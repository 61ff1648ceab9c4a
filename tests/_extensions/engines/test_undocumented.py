"""What torch does not document of groups and of DDP may be missing."""

import pytest
import torch
import torch.distributed as dist
from reimported import reimported
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fnloop._extensions.engines import distributed, exchanges, torch_compat


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_collectives_are_counted(group):
    before = torch_compat.collectives_begun(group)
    dist.all_reduce(torch.zeros(1))
    assert torch_compat.collectives_begun(group) == before + 1
    assert torch_compat.collectives_begun(object()) is None
    assert torch_compat.process_groups() == [group]


def test_uncounted_collectives_are_suspected_everywhere(group, monkeypatch, caplog):
    assert exchanges.collective_count() == exchanges.collective_count()
    monkeypatch.setattr(exchanges, "_counts", True)
    monkeypatch.setattr(exchanges, "collectives_begun", lambda group: 0)
    exchanges.check_collective_count(torch.device("cpu"))
    assert "does not count the collectives of gloo" in caplog.text
    assert exchanges.collective_count() != exchanges.collective_count()


def test_without_names_of_groups_the_default_one_is_used_or_it_raises(group, monkeypatch):
    for name in ("distributed_c10d", "_broadcast_coalesced"):
        monkeypatch.delattr(dist, name)
    without = reimported(torch_compat)
    assert without.process_groups() == [group]
    with pytest.raises(RuntimeError, match="_get_default_store, which fnloop needs"):
        without.default_store()
    with pytest.raises(RuntimeError, match="_world, which fnloop needs"), without.meeting_in(None):
        pass
    column = torch.arange(4.0).view(2, 2)[:, 1]  # not contiguous
    without.broadcast_coalesced(group, [column])
    assert column.tolist() == [1.0, 3.0]


class Passing(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, loss):
        return loss


def test_without_its_names_ddp_averages_by_its_own_forward(group, monkeypatch):
    def forward(self, loss):
        (loss,), _ = self._pre_forward(loss)
        return self._renamed(self.module(loss))

    def gradient():
        ddp = DistributedDataParallel(Passing())
        torch_compat.reduce_in_backward(ddp, ddp.module.w * 3).backward()
        return ddp.module.w.grad.item()

    assert gradient() == 3.0
    renamed = DistributedDataParallel._post_forward
    monkeypatch.setattr(DistributedDataParallel, "_renamed", renamed, raising=False)
    monkeypatch.setattr(DistributedDataParallel, "forward", forward)
    monkeypatch.delattr(DistributedDataParallel, "_post_forward")
    assert gradient() == 3.0


def test_a_ddp_that_does_not_average_is_an_error(group, monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)  # the mean of the ranks is 1
    distributed._check_ddp.__wrapped__(torch.device("cpu"))
    monkeypatch.setattr(distributed, "reduce_in_backward", lambda ddp, loss: loss * 2)
    with pytest.raises(RuntimeError, match="does not average gradients"):
        distributed._check_ddp.__wrapped__(torch.device("cpu"))


def test_an_autograd_node_without_its_name_has_no_leaf():
    assert torch_compat.leaf_of(object()) is None
