"""NaNs are traced by torch's own means: its anomaly detection, and hooks of modules."""

import pytest
import torch
from torch import nn

import fnloop as fl


class Root(nn.Module):
    """Gives 0, with the gradient infinity × 0."""

    def forward(self, x):
        return (x * 0).sqrt() * 0


class Log(nn.Module):
    def forward(self, x):
        return x.log()


def create(*layers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 2), *layers, nn.Linear(2, 1))
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return fl.TrainState.create(model, torch.optim.SGD(model.parameters(), lr=0.1))


def square(model, batch):
    return model(batch).square().mean()


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("members", "layer"),
    [
        ((), "backward"),
        ((fl.clip(1.0), fl.amp("bf16")), "backward"),
        ((fl.accumulate(2),), "accumulate(2)"),
        ((fl.microbatch(1), fl.clip(1.0)), "microbatch(1)"),
    ],
    ids=repr,
)
def test_anomaly_detection_around_a_run_names_the_line_and_the_place(members, layer):
    step, state = fl.pipeline(*members)(square), create(Root())
    with (
        pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values") as caught,
        pytest.warns(UserWarning, match=r"return \(x \* 0\).sqrt\(\) \* 0"),
        torch.autograd.detect_anomaly(check_nan=True),
    ):
        fl.fit(step, state, [torch.ones(2, 2)] * 2, hooks=())
    assert caught.value.__notes__ == [f"while in {layer}, train, epoch 1, batch 0, step 0"]
    assert all(p.isfinite().all() for p in caught.value.state.model.parameters())


def test_hooks_of_modules_name_the_one_that_makes_a_nan():
    def watch(name):
        def check(module, inputs, output):
            if not output.isfinite().all():
                raise FloatingPointError(f"the output of {name!r} is not finite")

        return check

    state = create(nn.Sequential(nn.Tanh(), Log()))
    for name, module in state.model.named_modules():
        module.register_forward_hook(watch(name))
    batches = [torch.ones(2, 2), -torch.ones(2, 2)]
    with pytest.raises(FloatingPointError, match=r"the output of '1\.1' is not finite") as caught:
        fl.fit(fl.pipeline(fl.accumulate(1))(square), state, batches, hooks=())
    place = "while in the loss function square, train, epoch 1, batch 1, step 1"
    assert caught.value.__notes__ == [place]
