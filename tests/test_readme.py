"""What the README shows can be typed."""

import re
from pathlib import Path

import torch
from torch import nn

import fnloop

README = Path(fnloop.__file__).parent.parent / "README.md"


def test_the_code_of_the_readme_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)
    model = nn.Linear(3, 2)
    batches = [(torch.ones(4, 3), torch.zeros(4, dtype=torch.long))] * 5
    names = {
        "__name__": "readme",  # what is pickled is looked up there, not in every module that is imported
        "nn": nn,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "train": batches,
        "valid": batches,
    }
    exec(first, names)
    assert names["state"].epoch == 8 and len(names["state"].history["valid/loss"]) == 8
    for block in blocks:
        exec(block, names)


def test_every_public_name_is_in_the_readme_or_in_the_changelog():
    text = README.read_text() + README.with_name("CHANGELOG.md").read_text()
    assert [name for name in fnloop.__all__ if not re.search(rf"\b{name}\b", text)] == []
