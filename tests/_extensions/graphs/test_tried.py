"""What ``dry_run`` says of an update that a graph may capture."""

import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss


def test_what_only_an_evaluation_reads_can_be_captured():
    def loss_fn(model, batch):
        loss, aux = toy_loss(model, batch)
        return (loss, aux) if model.training or loss.item() < 9 else (0 * loss, aux)

    ones = [torch.ones(2)]
    report = fl.dry_run(fl.pipeline()(loss_fn), toy(), (ones, ones))
    assert [found.text for found in report.findings if found.kind == "graph"] == [
        "nothing was seen that cuda_graph could not capture"
    ]
