import pytest
import torch

from fnloop._loop import hints
from fnloop._loop.hints import fused_hint, suggest_fused

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.zeros(1, dtype=dtype))]


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_that_could_be_fused_is_told_so(make):
    assert f"{make.__name__}(..., fused=True) makes one" in fused_hint(make(parameters()))
    assert "fused=True" in fused_hint(make(parameters(), foreach=False))


@pytest.mark.parametrize(
    "settings", [{"fused": True}, {"fused": False}, {"foreach": True}, {"differentiable": True}]
)
def test_an_optimizer_is_left_to_what_it_was_told(settings):
    assert fused_hint(torch.optim.SGD(parameters(), lr=0.1, **settings)) is None


def test_one_without_a_fused_form_is_told_of_foreach():
    assert fused_hint(torch.optim.RMSprop(parameters())) is None
    assert "without foreach=False" in fused_hint(torch.optim.RMSprop(parameters(), foreach=False))


def test_parameters_that_fused_can_not_take_and_optimizers_of_others_are_left_alone():
    assert fused_hint(torch.optim.SGD(parameters(torch.complex64), lr=0.1)) is None
    assert fused_hint(torch.optim.LBFGS(parameters())) is None


def test_the_hint_comes_once_for_each_kind_of_optimizer(caplog):
    suggest_fused([torch.optim.NAdam(parameters(), foreach=False)], CUDA)
    suggest_fused([torch.optim.NAdam(parameters(), foreach=False)], CUDA)
    assert len(caplog.messages) == 1


def test_on_the_cpu_fused_adam_is_named_with_its_rounding_and_nothing_else(caplog):
    suggest_fused([torch.optim.RAdam(parameters(), foreach=False)], CPU)
    suggest_fused([torch.optim.SGD(parameters(), lr=0.1)], CPU)
    suggest_fused([torch.optim.AdamW(parameters(), fused=False)], CPU)
    suggest_fused([torch.optim.AdamW(parameters())], torch.device("meta"))
    assert not caplog.messages
    assert fused_hint(torch.optim.AdamW(parameters()), "cpu") == (
        "fit: AdamW makes several passes over the parameters; AdamW(..., fused=True) makes one, "
        "equal up to rounding"
    )
    hints._log_once.cache_clear()
    suggest_fused([torch.optim.AdamW(parameters())], CPU)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_what_is_advised_on_the_cpu_works_there(make):
    (mine,), (fused,) = parameters(), parameters()
    for p, settings in ((mine, {}), (fused, {"fused": True})):
        p.grad = torch.ones(1)
        make([p], lr=0.5, **settings).step()
    assert mine.item() == pytest.approx(-0.5) and fused.item() == pytest.approx(-0.5)
