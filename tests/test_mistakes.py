"""Mistakes that newcomers made in trials: what each is told, as an error, a note or a warning.

The letters are those of the trials. Tensor parallelism alone (X9) is in
``processes/test_tensor_parallel.py``; what a terminal and a notebook show, and the end line, are in
``test_notebook.py``, ``_extensions/hooks/test_progress_log.py`` and ``_loop/test_tracebacks.py``.
"""

import re

import pytest
from programs import run

TORCHMETRICS = "metric(f1=from_torchmetrics(f1, lambda aux, batch: "
BATCHNORM = (
    "model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))\nstate = state_of(model)\n"
    "def hook(state):\n    state.model(batch)\n    return state\n"
)
TRAINED = "fit(step, state, (train, valid), hooks=(checkpoint(folder),))\n"
TOLD = {  # what was found: a program, and words of what it is told
    "N1: a hook returns the state of another model": (
        "fit(step, state, batches, hooks=(lambda state: state_of(nn.Linear(2, 1)),))",
        "<lambda> returned a state of another run. Return the state that it was called with",
    ),
    "N2: a hook moves BatchNorm": (
        BATCHNORM + "fit(step, state, batches, hooks=(hook,))",
        "write in the hook: with fl.evaluating(state)",
    ),
    "N3: the loss function uses a global model": (
        "other = nn.Linear(2, 1)\n"
        "fit(pipeline()(lambda model, batch: other(batch).mean()), state, batches)",
        "uses another model than the one that it is given, such as a global variable",
    ),
    "N4: another learning rate after a resume": (
        TRAINED + "state = state_of(nn.Linear(2, 1))\n"
        "state.optimizer.param_groups[0]['lr'] = 0.001\nresume(folder, state)",
        "lr is 0.1 there, and 0.001 here. To take those of this state, write resume(folder, state, "
        'given=("lr",))',
    ),
    "N5: return output, loss": (
        "def loss_fn(model, batch):\n    output = model(batch)\n"
        "    return output, output.mean()\n"
        "fit(pipeline()(loss_fn), state, batches)",
        "loss_fn must return a loss or (loss, aux); it returned a scalar tensor second. The loss "
        'is first, and the rest in a mapping: return loss, {"output": output}',
    ),
    "N5: a middleware without the layer of settings": (
        "@middleware('gradient')\ndef mine(step):\n    return step\n",
        "but mine takes the step itself. Put it into a function of its settings, of none for "
        "example: def mine(): return wrap",
    ),
    "N5: a warmup that is longer than the run": (
        "fit(pipeline(schedule(cosine(warmup=100)))(loss_fn), state, batches, epochs=2)",
        "cosine: the warmup takes 100 updates, and the run has 8, so it ends at 8% of the initial "
        "value: give a fraction of the run, such as 0.1",
    ),
    "N5: lists of batches as [train, valid]": (
        "fit(step, state, [train, valid])",
        "If they are the loaders, write a pair: fit(step, state, (train, valid))",
    ),
    "N6: a metric of (output, target)": (
        "def accuracy(output, target):\n    return (output == target).float().mean()\n"
        "metric(accuracy=accuracy)",
        "accuracy takes (output, target). Write metric(accuracy=lambda aux, batch: accuracy("
        'aux["output"], batch[1])), and return loss, {"output": output} in the loss function',
    ),
    "N6: a metric of torchmetrics": (
        "import torchmetrics\nmetric(f1=torchmetrics.MeanSquaredError())",
        f"got the torchmetrics MeanSquaredError. Write {TORCHMETRICS}",
    ),
    "N6: F1 of each batch": (
        "fit(pipeline(metric(f1=lambda aux, batch: 0.5))(loss_fn), state, batches)",
        "metric 'f1' is averaged over the batches, and the f1 of all of them is another number",
    ),
    "N L: max_epochs": (
        "fit(step, state, batches, max_epochs=3)",
        "fit has no argument max_epochs=. Write epochs=3",
    ),
    "N L: callbacks": (
        "fit(step, state, batches, callbacks=())",
        "fit has no argument callbacks=. Write hooks=(progress(), ...)",
    ),
    "N L: loader": (
        "fit(step, state, loader=batches)",
        "fit has no argument loader=. Write fit(step, state, loaders)",
    ),
    "N L: a name that is misspelt": (
        "run(step, state, batches, epoch=3)",
        "run has no argument epoch=. Did you mean 'epochs'?",
    ),
    "N L: a forgotten state": (
        "fit(step, batches)",
        "fit lacks loaders: write state = fit(step, state, loaders); got",
    ),
    "N L: state.stop = ...": (
        "state.stop = 'enough'",
        "a state cannot be changed: write state = attrs.evolve(state, stop='enough')",
    ),
    "N L: checkpoint(existing file)": (
        "open(path, 'w').close()\nfit(step, state, batches, hooks=(checkpoint(path),))",
        "saved is a file, and a run writes its checkpoints into a folder",
    ),
    "N L: restore(folder)": (
        TRAINED + "restore(folder, state_of(nn.Linear(2, 1)))",
        "It is a folder of checkpoints. For the newest of them, write restore(latest(",
    ),
    "N L: history['loss']": (
        "fit(step, state, (train, valid)).history['loss']",
        "Did you mean 'valid/loss'?",
    ),
    "N L: the history of a misspelt metric": (
        "fit(step, state, batches).history['train/los']",
        "Did you mean 'train/loss'?",
    ),
    "N L: restore_best of an accuracy with mode='min'": (
        "restore_best('valid/accuracy', mode='min')",
        'restore_best("valid/accuracy", mode="min"): the lowest value counts as the best, and the '
        "name says that higher is better. If it is, leave mode= out",
    ),
    "N L: a schedule of epochs": (
        "schedule(lambda epoch: 0.95**epoch)",
        "schedule calls a function of one argument with the state; <lambda> takes epoch. Write "
        "schedule(lambda state: ...) with state.epoch in it",
    ),
    "C2: ReduceLROnPlateau": (
        "kind = torch.optim.lr_scheduler.ReduceLROnPlateau\n"
        "member = torch_scheduler(lambda optimizer, run: kind(optimizer))\n"
        "fit(pipeline(member)(loss_fn), state, batches)",
        'List plateau("valid/loss", factor=0.1, patience=11, min_delta=0.0001, relative=True) in '
        "its place",
    ),
    "C L: attrs.evolve(state, optimizer={...})": (
        "attrs.evolve(state, optimizer={'a': optimizer})",
        "expects one optimizer, as the state has; got the names a",
    ),
    "X L: a hook with nothing but failed": (
        "class Mine:\n    def failed(self, state, error): ...\n"
        "fit(step, state, batches, hooks=(Mine(),))",
        "which has a method failed, but no method __call__(state). Write one",
    ),
    "X L: a Hook with nothing but failed": (
        "class Mine(fl.Hook):\n    def failed(self, state, error): ...\n"
        "fit(step, state, batches, hooks=(Mine(),))",
        "Mine is a Hook without a method __call__: define it, (state) -> state",
    ),
    "X L: restore of a checkpoint of Lightning": (
        "torch.save({'state_dict': {}, 'pytorch-lightning_version': '2'}, path + '.ckpt')\n"
        "restore(path + '.ckpt', state)",
        'see the page of the book "Checkpoints of other libraries"',
    ),
    "B L: what no checkpoint can hold": (
        "optimizer.param_groups[0]['mine'] = b'x'\n"
        "fit(step, state, batches, hooks=(checkpoint(folder),))",
        "while in checkpoint",
    ),
    "B L: a dataclass as a batch": (
        "import dataclasses\n@dataclasses.dataclass\nclass Pair:\n    x: object\n"
        "fit(pipeline()(lambda model, batch: model(batch.x).mean()), state, [Pair(batch)])",
        "a Pair is not a tensor, or a tuple, a list or a mapping of tensors",
    ),
}


def said_by(program, folder, caplog, monkeypatch):
    monkeypatch.chdir(folder)
    return run(program, folder, caplog)


@pytest.mark.parametrize(("program", "words"), TOLD.values(), ids=TOLD)
def test_a_mistake_is_told_what_to_write(program, words, tmp_path, caplog, monkeypatch):
    if "torchmetrics" in program:
        pytest.importorskip("torchmetrics")
    said, _ = said_by(program, tmp_path, caplog, monkeypatch)
    assert any(words in text for text in said), said


QUIET = {
    "B L: another batch size after a resume": (
        "of = lambda size: DataLoader(torch.ones(12, 2), size, shuffle=True)\n"
        "save(fit(step, state, of(2), steps=4), path)\n"
        "state = fit(step, restore(path, state_of(nn.Linear(2, 1))), of(3), epochs=2)\n"
        "assert state.epoch == 2"
    ),
    "N L: a mode that the name does not contradict": (
        "early_stop('valid/bleu', mode='max')\nrestore_best('valid/loss', mode='min')\n"
        "History([Record(1, 1, {'a/loss': 1.0})]).best('a/loss', 'max')"
    ),
    "N5: a warmup that ends with the run": (
        "fit(pipeline(schedule(cosine(warmup=4)))(loss_fn), state, batches)"
    ),
    "N5: two batches of a list": (
        "fit(pipeline()(lambda model, batch: model(batch[0]).mean()), state, [[batch] * 2] * 2)"
    ),
    "N6: F1 that sees all batches": (
        "fit(pipeline(metric(f1=lambda aux, batch: Mean(1.0, 2)))(loss_fn), state, batches)"
    ),
}


@pytest.mark.parametrize("program", QUIET.values(), ids=QUIET)
def test_what_is_right_is_told_nothing(program, tmp_path, caplog, monkeypatch):
    said, error = said_by(program, tmp_path, caplog, monkeypatch)
    assert (said, error) == ([], None)


def test_what_cannot_be_saved_is_refused_before_the_first_update(tmp_path, caplog, monkeypatch):
    program, _ = TOLD["B L: what no checkpoint can hold"]
    _, error = said_by(program, tmp_path, caplog, monkeypatch)
    assert "mine" in str(error) and not hasattr(error, "state")


def test_a_stop_iteration_of_a_loss_function_in_run_has_the_state_and_the_notes(
    tmp_path, caplog, monkeypatch
):
    program = "list(run(pipeline()(lambda model, batch: next(iter([]))), state, batches))"
    said, error = said_by(program, tmp_path, caplog, monkeypatch)
    assert type(error) is RuntimeError and error.state.step == 0
    assert said[-1] == "while in the loss function <lambda>, train, epoch 1, batch 0, step 0"


def test_laws_show_no_whole_tensors(tmp_path, caplog, monkeypatch):
    program = (
        "@middleware('gradient')\ndef bad():\n    n = []\n    def wrap(step):\n"
        "        def growing(state, batch):\n            n.append(1)\n"
        "            state, out = step(state, batch)\n"
        "            for p in state.model.parameters():\n                p.grad.mul_(len(n))\n"
        "            return state, out\n        return growing\n    return wrap\n"
        "check_laws(pipeline(bad()))"
    )
    said, error = said_by(program, tmp_path, caplog, monkeypatch)
    assert isinstance(error, AssertionError) and len(said[0]) < 400
    assert re.search(r"model\.0\.weight: two tensors\n", said[0])
