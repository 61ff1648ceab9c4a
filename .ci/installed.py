"""Check an installed fnloop: every module imports, it is typed, and it trains, saves, restores."""

import importlib
import importlib.metadata
import pkgutil
import tempfile
from pathlib import Path

import torch

import fnloop as fl
from fnloop.testing import toy, toy_loss

folder = Path(fl.__file__).parent
assert "site-packages" in folder.parts, f"{folder} is not what was installed"
assert (folder / "py.typed").is_file()
assert fl.__version__ == importlib.metadata.version("fnloop")
modules = [module.name for module in pkgutil.walk_packages(fl.__path__, "fnloop.")]
for name in modules:
    importlib.import_module(name)
state = fl.fit(fl.pipeline(fl.clip(1.0))(toy_loss), toy(), [torch.ones(2)] * 3, epochs=2, hooks=())
assert state.step == 6
with tempfile.TemporaryDirectory() as place:
    assert fl.restore(fl.save(state, f"{place}/a"), toy()).step == 6
print(f"fnloop {fl.__version__}: {len(modules)} modules")
