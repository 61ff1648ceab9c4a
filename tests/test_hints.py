import pytest
import torch

from fnloop._hints import hint_at_fused, slower_than_it_could

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(1, dtype=dtype))]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_that_could_be_fused_is_told_so(make):
    assert f"{make.__name__}(..., fused=True) makes one" in slower_than_it_could(make(parameters()))
    assert "fused=True" in slower_than_it_could(make(parameters(), foreach=False))


@pytest.mark.parametrize("settings", [{"fused": True}, {"fused": False}, {"foreach": True}, {"differentiable": True}])
def test_an_optimizer_is_left_to_what_it_was_told(settings):
    assert slower_than_it_could(torch.optim.SGD(parameters(), lr=0.1, **settings)) is None


def test_one_without_a_fused_form_is_told_of_foreach():
    assert slower_than_it_could(torch.optim.RMSprop(parameters())) is None
    assert "leave out foreach=False" in slower_than_it_could(torch.optim.RMSprop(parameters(), foreach=False))


def test_parameters_that_fused_can_not_take_and_optimizers_of_others_are_left_alone():
    assert slower_than_it_could(torch.optim.SGD(parameters(torch.complex64), lr=0.1)) is None
    assert slower_than_it_could(torch.optim.LBFGS(parameters())) is None


def test_the_hint_comes_once_and_on_cuda_only(caplog):
    optimizer = torch.optim.NAdam(parameters(), foreach=False)
    hint_at_fused(optimizer, CPU)
    assert not caplog.messages
    hint_at_fused(optimizer, CUDA)
    hint_at_fused(torch.optim.NAdam(parameters(), foreach=False), CUDA)
    assert len(caplog.messages) == 1
