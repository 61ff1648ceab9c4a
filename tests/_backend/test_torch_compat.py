"""Private names of torch are used in files of one name, and each may be missing."""

import ast
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.utils._python_dispatch
from reimported import reimported
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as optim
from torch.utils.data import DataLoader

import fnloop
from fnloop._backend import torch_compat

ROOT = Path(fnloop.__file__).parent
COMPATS = [*ROOT.rglob("torch_compat.py")]  # the kernel's, and those of extensions
UNDOCUMENTED = {  # names of torch without an underscore that its reference does not have
    *("default_generators", "distributed_c10d", "prepare_for_forward", "profile_hook_step"),
    *("__wrapped__", "_popen"),
}
OTHERS = {  # private names of other libraries, each in one file
    "_extensions/histories/figures.py": {"_repr_png_"},  # IPython's protocol
    "_extensions/middleware/schedule.py": {"_repr_html_"},
    "_extensions/engines/accelerated.py": {"_shared_state", "_models", "_optimizers"},
    "_extensions/hooks/accelerated.py": {"_shared_state"},  # accelerate's
    "_extensions/torchmetrics.py": {"_to_sync", "_update_count", "_defaults", "_reductions"},
    "_extensions/engines/exchanges.py": {"_exit", "_current_frames"},  # documented, of os and sys
    "_extensions/tools/dry_run.py": {"_getframe"},  # documented, of sys
    "debug/_watch.py": {"_getframe"},
    "_loop/peers.py": {"_signal"},  # Python's
}


# --- no other file uses one


is_private = lambda name: name.startswith("_") and not name.startswith("__")


def private_uses(tree):
    """Yield each private name in a module that may belong to another library: (line, name)."""
    for node in ast.walk(tree):
        found = []
        if isinstance(node, ast.Attribute):
            found = [node.attr]
        elif isinstance(node, ast.Call) and len(node.args) > 1:
            called, name = node.func, node.args[1]
            reads = isinstance(called, ast.Name) and called.id.endswith("attr")
            if reads and isinstance(name, ast.Constant) and is_private(str(name.value)):
                found = [name.value]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{of}{alias.name}" for alias in node.names]
            found = [p for name in names if name.startswith("torch.") for p in name.split(".")]
        yield from ((node.lineno, p) for p in found if is_private(p) or p in UNDOCUMENTED)


def own_names(trees):
    """Return the private names that fnloop itself defines in functions, classes and slots."""
    found = {"_fields", "_replace"}  # of named tuples, documented
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            target = getattr(line, "target", None) or [*getattr(line, "targets", ()), None][0]
            if isinstance(target, ast.Name):
                found.add(target.id)
                if target.id == "__slots__":
                    found |= set(ast.literal_eval(line.value))
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
            found.add(node.attr)
    return found


@pytest.fixture(scope="module")
def trees():
    paths = [path for path in ROOT.rglob("*.py") if path not in COMPATS]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in paths}


def test_no_other_file_uses_a_private_name_of_torch(trees):
    own = own_names(trees.values())
    assert not [
        f"{path}:{line} {name}"
        for path, tree in trees.items()
        for line, name in private_uses(tree)
        if name not in own and name not in OTHERS.get(path, ())
    ]


def test_no_other_file_spells_a_name_that_torch_compat_guards(trees):
    compats = [ast.parse(path.read_text()) for path in COMPATS]
    names = {name for tree in compats for _, name in private_uses(tree)} - {"__wrapped__"}
    nodes = [node for tree in compats for node in ast.walk(tree)]
    names |= {node.value for node in nodes if isinstance(node, ast.Constant)}
    guarded = {n for n in names if isinstance(n, str) and is_private(n) and n.isidentifier()}
    assert {"_orig_mod", "_foreach_norm", "_local_tensor"} <= guarded
    for path, tree in trees.items():
        assert not {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)} & guarded, path


@pytest.mark.parametrize("line", [
    "import torch._dynamo", "from torch.utils import _pytree", "torch._foreach_norm([])",
    "from torch.optim.optimizer import _global_optimizer_pre_hooks", "tensor._version",
    "getattr(model, '_orig_mod', None)", "torch.cuda.default_generators",
])  # fmt: skip
def test_a_private_name_is_found(line):
    assert [*private_uses(ast.parse(line))]


# --- each may be missing


@pytest.fixture
def without(monkeypatch):
    """Return a function that removes names of torch, and imports torch_compat again."""

    def without(owner, *names):
        for name in names:
            monkeypatch.delattr(owner, name)
        return reimported(torch_compat)

    return without


@pytest.mark.slow
def test_import_fnloop_depends_on_no_private_name():
    code = """if True:
        import accelerate, torch, torch.distributed as dist
        import torch.utils._python_dispatch as dispatch
        from torch.optim import optimizer as optim
        removed = []
        for owner, *names in (
            (torch.optim.Optimizer, "profile_hook_step"),
            (optim, "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
            (torch.autograd, "_profiler_enabled"),
            (torch, *(name for name in dir(torch) if name.startswith(("_foreach_", "_amp_")))),
            (torch.cuda, "default_generators"),
            (dispatch, "TorchDispatchMode"),
            (dist, "_broadcast_coalesced", "distributed_c10d"),
            (torch.nn.parallel.DistributedDataParallel, "_post_forward"),
        ):
            removed += [(owner, name, vars(owner)[name]) for name in names]
            for name in names:
                delattr(owner, name)
        import fnloop as fl
        for entry in removed:
            setattr(*entry)  # torch itself needs some of them
        from fnloop.testing import toy, toy_loss
        state, _ = fl.pipeline(fl.clip_value(1.0))(toy_loss)(toy(), torch.tensor([4.0]))
        print(state.model.w.item())
    """
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.strip() == "-1.0", ran.stderr


def train(compat, hook=None):
    """Update a weight of 0 by a gradient of 2; return what the hook has seen, and the weight."""
    weight, seen = nn.Parameter(torch.zeros(())), []
    weight.grad = torch.tensor(2.0)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if hook is not None:
        getattr(optimizer, hook)(lambda *_: seen.append(weight.item()))
    compat.apply_optimizer(optimizer)
    return seen, weight.item()


@pytest.fixture
def marks(monkeypatch):
    """The steps that a wrapper of torch has marked for a profiler."""
    found, profiler = [], torch.autograd.profiler
    mark = profiler.record_function
    note = lambda name: found.append(name) or mark(name)
    monkeypatch.setattr(profiler, "record_function", note)
    return found


@pytest.mark.parametrize(
    ("hook", "seen"), [("register_step_pre_hook", [0.0]), ("register_step_post_hook", [-2.0])]
)
def test_the_wrapper_is_skipped_only_while_it_has_nothing_to_do(hook, seen, marks):
    assert (train(torch_compat), marks) == (([], -2.0), [])
    assert train(torch_compat, hook) == (seen, -2.0)
    assert marks == ["Optimizer.step#SGD.step"]


@pytest.mark.parametrize(("owner", "name"), [
    (Optimizer, "profile_hook_step"), (optim, "_global_optimizer_pre_hooks"),
    (optim, "_global_optimizer_post_hooks"), (torch.autograd, "_profiler_enabled"),
])  # fmt: skip
def test_without_a_name_the_wrapper_is_called(request, without, owner, name):
    compat = without(owner, name)
    request.getfixturevalue("monkeypatch").undo()  # torch itself needs some of them
    marks = request.getfixturevalue("marks")
    assert train(compat) == ([], -2.0)
    assert marks == ["Optimizer.step#SGD.step"]


def test_a_wrapper_that_does_more_is_not_skipped(monkeypatch, without):
    def profile_hook_step(step):
        def wrapper(*args):
            print(args)
            return step(*args)

        return wrapper

    monkeypatch.setattr(Optimizer, "profile_hook_step", staticmethod(profile_hook_step))
    compat = without(torch)
    assert getattr(compat.STEP_WRAPPER, "co_names", None) is None


@pytest.mark.parametrize(("name", "arguments", "expected"), [
    ("clamp_min_", (-1.0,), [-1.0, 6.0]), ("clamp_max_", (1.0,), [-3.0, 1.0]),
    ("mul_", (0.5,), [-1.5, 3.0]), ("div_", (torch.tensor(3.0),), [-1.0, 2.0]),
    ("copy_", ([torch.tensor(7.0), torch.tensor(8.0)],), [7.0, 8.0]),
])  # fmt: skip
def test_lists_of_tensors_are_changed_one_by_one(without, name, arguments, expected):
    for compat in (torch_compat, without(torch, f"_foreach_{name}")):
        tensors = [torch.tensor(-3.0), torch.tensor(6.0)]
        getattr(compat, f"foreach_{name}")(tensors, *arguments)
        assert [t.item() for t in tensors] == expected


def test_norms_and_unscaling_of_lists_one_by_one(without):
    names = "_foreach_norm", "_amp_foreach_non_finite_check_and_unscale_"
    for compat in (torch_compat, without(torch, *names)):
        assert [*map(float, compat.foreach_norm([torch.tensor([3.0, 4.0])]))] == [5.0]
        grads, found = [torch.tensor([2.0, 4.0]), torch.tensor([6.0])], torch.zeros(())
        compat.unscale_(grads, found, torch.tensor(0.5))
        assert [g.tolist() for g in grads] == [[1.0, 2.0], [3.0]] and found.item() == 0
        infinite = [torch.tensor([1.0]), torch.tensor([float("inf")])]
        compat.unscale_(infinite, found, torch.tensor(1.0))
        assert found.item() == 1


class Nameless:
    """A tensor without its private names."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __getattr__(self, name):
        if is_private(name):
            raise AttributeError(name)
        return getattr(self.tensor, name)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch 2.11
def test_what_is_read_from_a_tensor():
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    for read in (tensor, Nameless(tensor)):
        before = torch_compat.version_of(read)
        assert torch_compat.version_of(read) == before
        tensor.add_(1)
        assert torch_compat.version_of(read) != before
    sparse = torch.sparse_coo_tensor([[1]], [5.0], (3,), check_invariants=True).coalesce()
    assert torch_compat.sparse_values(Nameless(sparse)).tolist() == [5.0]
    part = SimpleNamespace(to_local=lambda: tensor)
    assert torch_compat.local_tensor(part) is tensor


def test_without_its_generators_cuda_is_seeded_as_a_whole(without, monkeypatch):
    seeds = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    without(torch.cuda, "default_generators").seeder_of(0)(7)
    assert seeds == [7]


def test_without_dispatch_modes_watching_operators_raises(without):
    compat = without(torch.utils._python_dispatch, "TorchDispatchMode")

    class Watch(compat.DispatchMode):
        pass

    with pytest.raises(RuntimeError, match="has no TorchDispatchMode, which fnloop needs"), Watch():
        pass
    assert torch_compat.computes(SimpleNamespace(namespace="aten"))


def test_without_their_tables_modules_are_read_through_public_methods():
    class Tableless(nn.BatchNorm1d):
        pass

    module = Tableless(1)
    own = torch_compat.buffers_of(module)
    assert own is module._buffers
    public = SimpleNamespace(named_buffers=module.named_buffers)
    assert torch_compat.buffers_of(public) == own
    assert torch_compat.uncompiled(nn.Linear(1, 1)) is None


@pytest.mark.slow
def test_nothing_raises_when_a_worker_is_killed_on_purpose():
    """torch looks at its workers when one of them has ended, which a signal tells it."""
    loader = DataLoader([1, 2], num_workers=2, persistent_workers=True)
    batches = torch_compat.make_killable(iter(loader))
    assert sorted(int(batch) for batch in batches) == [1, 2]
    for worker in batches._workers:
        worker.terminate()
        time.sleep(0.2)  # the signal comes before the worker is waited for
        worker.join()
        assert worker.exitcode == -signal.SIGKILL
    batches._shutdown_workers()


class Batches(SimpleNamespace):
    """Those of a loader, to which there may be weak references."""


def test_without_their_names_loaders_are_left_alone_or_refused(caplog):
    assert torch_compat.make_killable(it := iter([1])) is it
    worker, done = SimpleNamespace(), []
    assert torch_compat.make_killable(SimpleNamespace(_workers=[worker]))._workers == [worker]
    ways = {"terminate": "asked", "kill": "killed"}
    process = SimpleNamespace(**{k: partial(done.append, v) for k, v in ways.items()})
    torch_compat.make_killable(batches := Batches(_workers=[SimpleNamespace(_popen=process)]))
    process.terminate()
    assert done == ["killed"] and batches
    loader = DataLoader([1])
    del loader._iterator
    torch_compat.forget_workers(loader)  # without persistent workers there is nothing to forget
    loader = SimpleNamespace(persistent_workers=True)
    with pytest.raises(RuntimeError, match="to restart persistent workers: leave them out"):
        torch_compat.forget_workers(loader)
    torch_compat.set_worker_dataset(None, [])
    assert "get_worker_info().dataset is a wrapper" in caplog.text
