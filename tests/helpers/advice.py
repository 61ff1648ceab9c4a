"""What messages say to write, followed: programs with a mistake, between « and »."""

from typing import NamedTuple


class Followed(NamedTuple):
    """A mistake, and where to paste what its message shows.

    Args:
        message: words of the message, as they are in the sources.
        program: a program; what stands between « and » is replaced by the code.
        code: how the piece of code begins that is pasted; by default the last one is.
        fill: what a user writes in the place of what the code leaves open.
        then: the next error, if the code is right and something else is missing.
    """

    message: str
    program: str
    code: str = ""
    fill: dict[str, str] = {}
    then: str | None = None


F = Followed
FOLLOWED = [
    # --- the first hour
    F("is a function that makes one. Call it",
      "pipeline(«clip»)(loss_fn)",
      fill={"...": "1.0"}),
    F("such as clip(1.0); got",
      "pipeline(«1.0»)(loss_fn)",
      "clip(1.0)"),
    F("A loss function goes into the second call",
      "step = «pipeline(loss_fn)»",
      fill={"...": ""}),
    F("is a hook: write fit(..., hooks=(",
      "«fit(pipeline(early_stop('valid/loss'))(loss_fn), state, (train, valid))»",
      "fit(..., hooks=(", {"...": "step, state, (train, valid)"}),
    F("To join two, write pipeline(",
      "p = pipeline(clip(1.0))\n"
      "pipeline(«p, ema(0.9)»)(loss_fn)",
      fill={"pipeline(": "", "...)": "ema(0.9)"}),
    F("expects a loss function; got the middleware",
      "step = «pipeline()(clip(1.0))»",
      "pipeline(clip(1.0), ...)", {", ...": ""}),
    F("For batches (x, y) and a criterion, write supervised(",
      "step = pipeline()(«nn.MSELoss()»)",
      "supervised(", {"MSELoss(...)": "nn.MSELoss()"}),
    F("supervised expects a criterion",
      "«supervised(nn.MSELoss)»",
      fill={"MSELoss": "nn.MSELoss"}),
    F("Write a loss function: def loss_fn",
      "criterion = nn.MSELoss()\n"
      "loss_fn = supervised(criterion)\n"
      "«»\n"
      "fit(pipeline()(loss_fn), state, [{'x': batch, 'y': torch.ones(3, 1)}])",
      "def loss_fn"),
    F("a pipeline takes a loss function first",
      "«pipeline()(state, batch)»"),
    F("is a step already: list all middleware in one",
      "step = pipeline()(loss_fn)\n"
      "«pipeline(clip(1.0))(step)»",
      fill={"...": "clip(1.0)"}),
    F("It lacks its loss function",
      "fit(«pipeline()», state, batches)"),
    F(" expects a step, as pipeline(...)(loss_fn)",
      "fit(«clip(1.0)», state, batches)",
      "pipeline(clip(1.0))"),
    F("is a loss function, write",
      "«fit(loss_fn, state, batches)»",
      fill={"...": "state, batches"}),
    F("The step comes before the state",
      "«fit(state, step, batches)»",
      fill={"...": "batches"}),
    F("takes (step, state, loaders), and the rest by name",
      "«fit(step, state, loaders, 3)»"),
    F("state = \0(step, state, loaders)",
      "«state = fit(step, batches)»",
      "state = "),
    F("has no argument",
      "fit(step, state, batches, «max_epochs=3»)",
      "epochs="),
    F("which is middleware: write pipeline(",
      "fit(«step, state, batches, hooks=(clip(1.0),)»)",
      fill={"pipeline": "pipeline", ")(loss_fn)": ")(loss_fn), state, batches"}),
    F("fit expects hooks as a tuple",
      "fit(step, state, batches, «hooks=early_stop('train/loss')»)",
      "hooks=", {"...": "'train/loss'"}),
    F("a pair of tensors, which looks like one batch",
      "from torch.utils.data import TensorDataset\n"
      "batch = torch.ones(3, 2), torch.ones(3, 1)\n"
      "step = pipeline()(supervised(nn.MSELoss()))\n"
      "fit(step, state, «batch»)",
      "DataLoader("),
    F("is taken as a batch. If its rows are samples, write list(\0",
      "x = batch.numpy()\n"
      "fit(step, state, «x»)",
      "list("),
    F("whose rows are no batches: write list(",
      "x = type('Table', (), {'to_numpy': lambda self: batch.numpy(), '__iter__': None})()\n"
      "fit(step, state, «x»)",
      "list("),
    F("If they are the loaders, write a pair",
      "train = valid = [batch] * 4\n"
      "«fit(step, state, [train, valid])»"),
    F("TrainState(...) is for fnloop itself",
      "state = «TrainState(model, optimizer)»"),
    F("expected a TrainState, as TrainState.create(",
      "fit(step, «model», batches)",
      "TrainState.create"),
    F("TrainState.create expects an optimizer second",
      "TrainState.create(model, «0.1»)",
      "torch.optim.SGD"),
    F("none of the optimizer's parameters belongs to this",
      "optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)\n"
      "optimizer = «optimizer»\n"
      "TrainState.create(model, optimizer)",
      fill={"SGD(": "torch.optim.SGD(", "...": "lr=0.1"}),
    F("the last call returned (state = fit(",
      "before = state\n"
      "new = fit(step, state, batches)\n"
      "«»\n"
      "evaluate(step, before, batches) if 'kept' not in globals() else None",
      "state = fit", {"state = fit(step, state, ...)": "kept = before = new"}),
    F("a state cannot be changed",
      "«state.stop = 'enough'»\n"
      "assert state.stop == 'enough'"),
    F("the model was in evaluation mode as a whole",
      "model.eval()\n"
      "«»\n"
      "fit(step, state, batches)"),
    F("Return its mean over the batch",
      "def loss_fn(model, batch):\n"
      "    loss = model(batch)\n"
      "    return «loss»\n"
      "fit(pipeline()(loss_fn), state, batches)"),
    F("Write: return reply['loss'], reply",
      "def loss_fn(model, batch):\n"
      "    reply = {'loss': model(batch).mean()}\n"
      "    «return reply»\n"
      "fit(pipeline()(loss_fn), state, batches)",
      fill={"reply['loss']": "reply['loss'], reply"}),
    F("predict expects a function (model, batch) -> anything first",
      "list(«predict(model, state, loader)»)"),
    # --- hooks and moments
    F("has moved the buffer",
      "model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))\n"
      "state = state_of(model)\n"
      "def hook(state):\n"
      "    «if True»:\n"
      "        state.model(batch)\n"
      "    return state\n"
      "fit(step, state, batches, hooks=(hook,))",
      "with fl.evaluating"),
    F("For a part of an epoch, write",
      "«every(steps=0.25)»"),
    F("For every update, write",
      "«every(epochs=1e-12)»"),
    F("needs to know how long an epoch is",
      "stream = lambda: iter(batches)\n"
      "fit(step, state, stream, hooks=(«every(epochs=0.5)»(early_stop('train/loss')),))",
      fill={"...": "2"}),
    F("combines moments such as",
      "at_start() | «3»",
      "every(epochs=1)"),
    F("For a function of the state write when",
      "function = lambda state: True\n"
      "at_start() | «function»"),
    F("expects every as every(epochs=1)",
      "measure(lambda state: {}, name='a', every=«3»)",
      "every(epochs=1)"),
    F("fit expects \0 as every(epochs=1)",
      "fit(step, state, (train, valid), evaluate_every=«3»)",
      "every(epochs=1)"),
    F("would have its one call at the first update",
      "fit(step, state, (train, valid), hooks=(«once(inspect(print, loader='valid'))»,))"),
    F("cannot be identified in another process",
      "class Hooks:\n"
      "    def __call__(self, state):\n"
      "        return state\n"
      "hook = Hooks()\n"
      "fit(step, state, batches, hooks=(«once(hook)»,))",
      fill={"...": "'mine'"}),
    F("two hooks would be remembered as",
      "hook = lambda state: state\n"
      "fit(step, state, batches, hooks=(once(hook), «once(hook)»))",
      fill={"...": "'mine'"}),
    F("the name does not say whether lower or higher",
      "early_stop('valid/bleu', «mode=None»)",
      "mode="),
    F("this run does not make metrics such as",
      "fit(step, state, batches, «steps=4», hooks=(early_stop('recent/loss'),))",
      fill={"...": "2"}),
    F("this run never makes",
      "fit(step, state, (train, valid), evaluate_every=«{'valid': "
      "None}»,hooks=(early_stop('valid/loss'),))",
      "every(epochs=1)"),
    F("To add it, list metric(",
      "def fn(aux, batch):\n"
      "    return batch.mean()\n"
      "fit(pipeline(«»)(loss_fn), state, (train, valid),hooks=(early_stop('valid/accuracy'),))",
      "metric("),
    F("An average reports it beside",
      "fit(pipeline(«»)(loss_fn), state, (train, valid),hooks=(early_stop('valid/ema/loss'),))",
      "ema(", {"ema(": "ema(0.9, "}),
    F("checkpoint ranks by nothing",
      "checkpoint(folder, mode='min', «best=None»)",
      "best="),
    F("inspect(fn, every=...) by itself",
      "fn = lambda state, outputs: None\n"
      "fit(step, state, (train, valid), hooks=(«every(epochs=1)(inspect(fn, reports=('a',)))»,))",
      fill={"...": "every(epochs=1)"}),
    F("live_plot() draws in a notebook",
      "fit(step, state, batches, hooks=(«live_plot()»,))"),
    F("track expects plain data in config",
      "import types\n"
      "value = types.SimpleNamespace()\n"
      "track('tensorboard', folder=folder, config={'a': «value»})",
      "str(", {"...": "value"}),
    F("For an object, write vars(config)",
      "import types\n"
      "config = types.SimpleNamespace(lr=0.1)\n"
      "track('tensorboard', folder=folder, config=«config»)"),
    F("needs a folder: track(",
      "«track('tensorboard')»"),
    F("does not say in which unit",
      "«time_limit(8)»"),
    F("time_limit expects a time above 0",
      "«time_limit()»",
      "time_limit(hours=8)"),
    F("requeue() saves nothing by itself",
      "fit(step, state, batches, hooks=(«progress()», requeue()))",
      "checkpoint(folder)"),
    F("returned a state of another run",
      "fit(step, state, batches, hooks=(lambda state: «state_of(nn.Linear(2, 1))»,))",
      "attrs.evolve", {"...": "stop='enough'"}),
    # --- middleware
    F("Write @middleware(",
      "«@middleware»\n"
      "def mine(factor):\n"
      "    return lambda step: step\n",
      "@middleware"),
    F("decorates a function of settings that returns step -> step, but",
      "wrap = lambda step: step\n"
      "@middleware('gradient')\n"
      "«def mine(step): return wrap(step)»\n"
      "mine()"),
    F("makes its slot itself: write",
      "«@middleware('gradient', init=lambda state: 0)»\n"
      "def mine():\n"
      "    return clip(1.0)\n"
      "mine()",
      "@middleware"),
    F("did not call the step that it wraps",
      "@middleware('gradient')\n"
      "def idle():\n"
      "    def wrap(step):\n"
      "        def wrapped(state, batch):\n"
      "            «out = Output(torch.ones(()), 1)»\n"
      "            return state, out\n"
      "        return wrapped\n"
      "    return wrap\n"
      "fit(pipeline(idle())(loss_fn), state, batches)",
      "state, out ="),
    F("got both. Write accumulate(total=",
      "«accumulate(4, total=8)»",
      "accumulate(total"),
    F("got neither. Write accumulate(4)",
      "«accumulate()»",
      "accumulate(4)"),
    F("a step takes a sequence of up to",
      "step = pipeline(accumulate(2))(loss_fn)\n"
      "«step(state, batch)»"),
    F("takes whole batches, and those of the training loader have",
      "fit(pipeline(«accumulate(total=4)»)(loss_fn), state, DataLoader(torch.ones(6, 2), 3))"),
    F("needs to know how many samples a batch has",
      "dataset, batch_size = torch.ones(6, 2), 3\n"
      "fit(pipeline(accumulate(total=6))(loss_fn), state, «lambda: iter(batches)»)",
      "DataLoader("),
    F("grad_norm expects by=",
      "grad_norm(«by='layer'»)",
      "by="),
    F("metric expects at least one name and function",
      "«metric()»",
      "metric(accuracy", {"...": "batch.mean()"}),
    F("derive expects at least one name and function",
      "«derive()»",
      "derive("),
    F("which is listed after it: write derive(",
      "a = lambda m: m['b'] + 1\n"
      "b = lambda m: m['loss']\n"
      "fit(pipeline(«derive(a=a, b=b)»)(loss_fn), state, batches)",
      "derive(b", {"b=...": "b=b", "a=...": "a=a"}),
    F("got the torchmetrics",
      "import torchmetrics\n"
      "accuracy = torchmetrics.MeanSquaredError()\n"
      "def loss_fn(model, batch):\n"
      "    output = model(batch[0])\n"
      "    loss = output.mean()\n"
      "    return loss, {'output': output}\n"
      "pairs = [(batch, torch.ones(3, 1))] * 2\n"
      "fit(pipeline(«metric(accuracy=accuracy)»)(loss_fn), state, pairs)",
      "metric("),
    F('\0(aux["output"], batch[1])',
      "def fn(output, target):\n"
      "    return (output - target).mean()\n"
      "def loss_fn(model, batch):\n"
      "    output = model(batch[0])\n"
      "    loss = output.mean()\n"
      "    return loss, {'output': output}\n"
      "pairs = [(batch, torch.ones(3, 1))] * 2\n"
      "fit(pipeline(«metric(a=fn)»)(loss_fn), state, pairs)",
      "metric(a="),
    F("is averaged over the batches, and the",
      "import torchmetrics\n"
      "def loss_fn(model, batch):\n"
      "    return model(batch).mean(), {}\n"
      "both = lambda aux, batch: (torch.ones(3), torch.ones(3).long())\n"
      "f1 = torchmetrics.classification.BinaryF1Score()\n"
      "fit(pipeline(«metric(f1=lambda aux, batch: 0.5)»)(loss_fn), state, batches)",
      "metric(f1", {"...": "f1, both"}),
    F("must return a scalar tensor or a Metric such as Sum",
      "value = 2.0\n"
      "fit(pipeline(metric(a=lambda aux, batch: «'x'»))(loss_fn), state, batches)",
      "Sum("),
    F("A function of one metric needs a name: metric(",
      "fn = lambda aux, batch: batch.mean()\n"
      "fit(pipeline(«metric(fn)»)(loss_fn), state, batches)",
      fill={"...": "fn"}),
    F('Write loaders=("',
      "metric(a=lambda aux, batch: 0.0, «loaders='valid'»)",
      "loaders="),
    F("is listed after a middleware that would see scaled gradients",
      "«pipeline(clip(1.0), amp('fp16'))»(loss_fn)",
      "pipeline(amp", {"...": "clip(1.0)"}),
    F("calls a function of one argument with the state",
      "fit(pipeline(«schedule(lambda epoch: 0.95**epoch)»)(loss_fn), state, batches)",
      "schedule(lambda state", {"...": "0.95**state.epoch"}),
    F("needs the items of the whole run",
      "step = pipeline(schedule(cosine(), by='items'))(loss_fn)\n"
      "«fit(step, state, loaders)»",
      "fit(", {"...": "12"}),
    F("scheduled expects names and functions",
      "«scheduled()»",
      "scheduled("),
    F("but ReduceLROnPlateau steps by a metric",
      "on_plateau = torch.optim.lr_scheduler.ReduceLROnPlateau\n"
      "member = «torch_scheduler(lambda optimizer, run: on_plateau(optimizer))»\n"
      "fit(pipeline(member)(loss_fn), state, (train, valid))",
      "plateau("),
    F("Instead of \0, list plateau(",
      "pipeline(«schedule(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))»)",
      "plateau("),
    F("Write torch_scheduler(lambda optimizer, run:",
      "StepLR = torch.optim.lr_scheduler.StepLR\n"
      "fit(pipeline(«schedule(StepLR(optimizer, 10))»)(loss_fn), state, batches)",
      "torch_scheduler("),
    F("of another optimizer than the state's",
      "StepLR = torch.optim.lr_scheduler.StepLR\n"
      "fit(pipeline(torch_scheduler(lambda opt, run: «StepLR(optimizer, "
      "10)»))(loss_fn),state_of(nn.Linear(2, 1)), batches)",
      "StepLR(opt", {"...": "10"}),
    F("write a function of the step instead of torch_scheduler",
      "fit(pipeline(«torch_scheduler(lambda optimizer, run: 3)»)(loss_fn), state, batches)",
      "schedule(lambda", {"...": "1.0"}),
    F("torch_scheduler is for one optimizer",
      "factory = lambda optimizer, run: torch.optim.lr_scheduler.StepLR(optimizer, 10)\n"
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])})\n"
      "fit(pipeline(«torch_scheduler(factory)»)(loss_fn), state, batches)",
      "torch_scheduler("),
    F(". Call it: \0()",
      "schedule(«cosine»)"),
    F("using expects names of optimizers, such as",
      "«using()»",
      "using("),
    F("using expects names of optimizers: write",
      "«using(['a', 'b'])»",
      "using("),
    F(". Call it: \0(...)",
      "fit(step, state, batches, hooks=(«early_stop»,))",
      "early_stop(", {"...": "'train/loss'"}),
    # --- checkpoints
    F("It is a folder of checkpoints",
      "latest(folder) or fit(step, state, batches, hooks=(checkpoint(folder),))\n"
      "state = state_of(nn.Linear(2, 1))\n"
      "state = «restore(folder, state)»\n"
      "assert state.step == 4",
      "restore("),
    F("is a file, and a run writes its checkpoints into a folder",
      "open(folder, 'w').close()\n"
      "fit(step, state, batches, hooks=(«checkpoint(folder)»,))"),
    F("has checkpoints of another run",
      "fit(step, state, batches, hooks=(checkpoint(folder),)) if not latest(folder) else None\n"
      "state = state_of(nn.Linear(2, 1))\n"
      "«»\n"
      "fit(step, state, batches, epochs=2, hooks=(checkpoint(folder),))",
      "state = resume("),
    F("To take those of this state, write resume(",
      "latest(folder) or fit(step, state, batches, hooks=(checkpoint(folder),))\n"
      "state = state_of(nn.Linear(2, 1))\n"
      "state.optimizer.param_groups[0]['lr'] = 0.01\n"
      "state = «resume(folder, state)»\n"
      "assert state.optimizer.param_groups[0]['lr'] == 0.01"),
    F("is a partial checkpoint, which holds only",
      "save(state, path, only=('model',)) if not latest(path) else None\n"
      "«restore(path, state)»"),
    F("or restore what matches",
      "save(state, path) if not fl.latest(path) else None\n"
      "state = state_of(nn.Sequential(nn.Linear(2, 1)))\n"
      "«restore(path, state, only=('model',))»",
      "restore("),
    F(". Create the former, or leave them out",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "latest(path) or save(state_of(two), path)\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])}, seed=0)\n"
      "«restore(path, state)»",
      "restore("),
    F(". Create the former, or leave it out",
      "latest(path) or save(state, path)\n"
      "state = TrainState.create(model, torch.optim.Adam(model.parameters()), seed=0)\n"
      "«restore(path, state)»",
      "restore("),
    F("the checkpoints in \0 name no metric",
      "fit(step, state, (train, valid), hooks=(checkpoint(folder),)) if not latest(folder) "
      "else None\n"
      "«best(folder)»",
      "best("),
    F('add it, only=("model", ...)',
      "save(state, path) if not fl.latest(path) else None\n"
      "restore(path, state, shapes='file', «only=('optimizer',)»)",
      'only=("model", ...)', {"...": "'optimizer'"}),
    F("has the rows of another run. To continue that run",
      "hooks = checkpoint(folder), to_csv(path)\n"
      "fit(step, state, batches, hooks=hooks) if not latest(folder) else None\n"
      "state = state_of(nn.Linear(2, 1))\n"
      "«»\n"
      "fit(step, state, batches, epochs=2, hooks=(to_csv(path),))"),
    F("writes what belongs to one run, and all runs would share it",
      "import shutil\n"
      "shutil.rmtree('runs', ignore_errors=True)\n"
      "states = {'a': state, 'b': snapshot(state)}\n"
      "found = «search(step, states, (train, valid), rungs=(1, 2), hooks=(checkpoint(folder),))»\n"
      "assert len(found.histories) == 2 and Path('runs').is_dir()",
      "search(..., ", {"...": "step, states, (train, valid), rungs=(1, 2)"}),
    F("has events, which would be lost: write",
      "Path(path).unlink(missing_ok=True)\n"
      "state = fit(step, state, batches, hooks=(to_jsonl(path, events=True),))\n"
      "fit(step, state, batches, epochs=2, hooks=(«to_jsonl(path)»,))",
      "to_jsonl("),
    F(": write only=(",
      "checkpoint(folder, «only='model'»)",
      "only="),
    F("a checkpoint is saved with NaN or inf in",
      "import shutil\n"
      "shutil.rmtree(folder, ignore_errors=True)\n"
      "torch.nn.init.constant_(model.weight, math.nan)\n"
      "fit(step, state, batches, epochs=2, «hooks=(checkpoint(folder),)»)",
      "hooks=", {"...": "checkpoint(folder)"}),
    F("this state is averaged(state, ",
      "state = averaged(fit(pipeline(ema(0.9))(loss_fn), state, batches), 'ema')\n"
      "«»\n"
      "fit(step, state, batches)",
      "TrainState.create", {"TrainState": "optimizer = sgd(state.model)\nstate = TrainState"}),
    F("it has none: list ema()",
      "state = fit(pipeline(«»)(loss_fn), state, batches)\n"
      "averaged(state, 'ema')",
      "ema(", {"ema()": "ema(0.9)"}),
    # --- states and optimizers
    F("and this state has several: say which one takes them",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "two[2].requires_grad_(False)\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])}, seed=0)\n"
      "«unfreeze(state, state.model[2])»",
      "unfreeze(", {"...": "state, state.model[2]"}),
    F("expects what to \0 after the state",
      "state = state_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))\n"
      "«freeze(state)»",
      "freeze(state, state", {"layer4": "get_submodule('0')"}),
    F("For all modules of it: \0(",
      "Linear = nn.Linear\n"
      "state = state_of(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))\n"
      "«freeze(state, nn.Linear)»"),
    F("Several are arguments of their own",
      "selectors = '0.*', '1.*'\n"
      "state = state_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)))\n"
      "«freeze(state, selectors)»"),
    F("History expects records, Record(",
      "History(«3»)",
      "Record(", {"Record(epoch, step, metrics)": "[Record(1, 1, {'train/loss': 0.5})]"}),
    F("a history is made of records",
      "History([«3»])",
      "Record(", {"epoch, step, metrics": "1, 1, {'train/loss': 0.5}"}),
    F("the state has several optimizers: write",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])}, seed=0)\n"
      "name = 'a'\n"
      "groups = «state.optimizer.param_groups»",
      "state.optimizer[name]"),
    F("and an update with both would change it twice",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "state = TrainState.create(two, {'a': sgd(two), 'b': sgd(two[1])}, seed=0)\n"
      "fit(pipeline(«»)(loss_fn), state, batches)",
      "using("),
    F("as the state has; got",
      "attrs.evolve(state, optimizer=«{'a': optimizer}»)",
      "TrainState.create",
      {"TrainState.create(model, optimizer)": "TrainState.create(model, optimizer).optimizer"}),
    F("write model.to_empty(",
      "model = nn.Linear(2, 1, device='meta')\n"
      "«»\n"
      "state_of(model)",
      "model.to_empty"),
    F("which a bare step does not know",
      "step = pipeline(schedule(cosine()))(loss_fn)\n"
      "«step(state, batch)»",
      "fit(", {", ...": ""}),
    F("needs the length of the run, but",
      "step = pipeline(schedule(cosine()))(loss_fn)\n"
      "loaders = lambda: iter(batches)\n"
      "«fit(step, state, loaders, epochs=2)»",
      "fit(", {"...": "8"}),
    F("needs the updates of the run, but items= ends it",
      "fit(pipeline(«schedule(cosine())»)(loss_fn), state, batches, items=12)",
      "schedule(", {"...": "cosine()"}),
    F("with torch.enable_grad()",
      "def loss_fn(model, batch):\n"
      "    x = batch.clone().requires_grad_()\n"
      "    «if True»:\n"
      "        return torch.autograd.grad(model(x).sum(), x, create_graph=True)[0].sum() + "
      "0 * model(x).sum()\n"
      "step = pipeline()(loss_fn)\n"
      "evaluate(step, state, batches)"),
    F("To continue anyway, pass attrs.evolve",
      "state = attrs.evolve(fit(step, state, batches), stop='enough')\n"
      "state = «state»\n"
      "state = fit(step, state, batches, epochs=2)\n"
      "assert state.epoch == 2"),
    F("epoch \0 is to continue at batch",
      "state = fit(step, state, batches, steps=2)\n"
      "batches = lambda size=1: iter([batch] * 4)\n"
      "«fit(step, state, batches())»",
      fill={"...": ""}),
    # --- data
    F("bucketed expects a limit",
      "bucketed([3, 5, 2], «batch_size=None»)",
      "batch_size="),
    F("write DataLoader(dataset, batch_sampler=",
      "dataset = torch.ones(3, 2)\n"
      "sampler = bucketed([3, 5, 2], batch_size=2)\n"
      "fit(step, state, «DataLoader(dataset, sampler=sampler)»)",
      "DataLoader(", {"...": "[3, 5, 2], batch_size=2"}),
    F("expects loaders by name, ",
      "«zip_cycle()»",
      "zip_cycle(", {"a=...": "a=batches", "b=...": "b=batches"}),
    F('and that of "\0" is not known. Give ratios=',
      "loader = lambda: iter(batches)\n"
      "fit(step, state, interleave({'a': loader}, «None»))",
      "ratios=", {"...": "'a': 1"}),
    F("of a loader whose length is not known: say how many batches",
      "loader, n = lambda: iter(batches), 2\n"
      "fit(step, state, «fraction(loader, 0.5)»)",
      "take("),
    F("batches is none: say how many",
      "fit(step, state, «fraction(loader, 0.01)»)",
      "take("),
    F("the loader reuses a tensor for its next batch",
      "def loader():\n"
      "    x = torch.ones(3, 2)\n"
      "    for i in range(4):\n"
      "        x.fill_(i)\n"
      "        yield «x»\n"
      "fit(pipeline(accumulate(2))(loss_fn), state, loader)",
      "x.clone()"),
    # --- several steps, several models
    F("unstack expects the state of a stack",
      "states = {'a': state, 'b': snapshot(state)}\n"
      "unstack(«state»)",
      "stack("),
    F("works with one model, and this state has",
      "state = stack({'a': state, 'b': snapshot(state)})\n"
      "find_lr(step, «state», batches, updates=10)",
      "unstack("),
    F("train the same parameters. Copy one first",
      "stack({'a': state, 'b': «state»})",
      "snapshot("),
    F("a stack of models has no output of its own",
      "state = stack({'a': state, 'b': snapshot(state)})\n"
      "x = batch\n"
      "«state.model(x)»"),
    F("Make it the same: attrs.evolve(state, extra={})",
      "other = snapshot(state)\n"
      "state = attrs.evolve(state, extra={'a': 1})\n"
      "stack({'a': «state», 'b': other})"),
    F(". To continue a run that was stopped",
      "other = snapshot(state)\n"
      "state = attrs.evolve(state, stop='enough')\n"
      "stack({'a': «state», 'b': other})"),
    F('batch="late" gives a turn one batch, but',
      "alternate({'a': pipeline(accumulate(2))(loss_fn)}, «batch='late'»)",
      'batch="next"'),
    F("a turn takes the batches of the turn before it",
      "alternate({'a': pipeline(accumulate(2))(loss_fn), 'b': pipeline()(loss_fn)}, "
      "«batch='same'»)",
      'batch="next"'),
    F("raw(\0, evaluate=loss_fn)",
      "def update(state, batch):\n"
      "    return Output(torch.zeros(()), len(batch))\n"
      "fit(«raw(update)», state, (train, valid))"),
    F("or give one another name: name=",
      "pipeline(ema(0.9), ema(0.99, «name='ema'»))",
      "name=", {"...": "slow"}),
    # --- tools
    F("as many as with another size: pass the size on",
      "data = torch.ones(64, 2)\n"
      "find_batch_size(step, state, «lambda size: batches»)",
      "DataLoader(", {"DataLoader": "lambda size: DataLoader"}),
    F("Give it a batch that fits",
      "inputs = batch\n"
      "summary(state, «'text'»)",
      "summary(state, (", {"summary(state, ": "", "))": ")"}),
    F("tune reads the loader more than once",
      "import itertools\n"
      "loader = iter([batch] * 40)\n"
      "data.tune(step, state, «loader», seconds=0.1)",
      "list("),
    F("Write check_laws(",
      "«check_laws(clip(1.0))»",
      "check_laws(", {"...": "clip(1.0)"}),
    F("replay: update \0 is before the first checkpoint",
      "import shutil\n"
      "shutil.rmtree(folder, ignore_errors=True)\n"
      "fit(step, state, batches, epochs=2, hooks=(«checkpoint(folder, keep=1)»,))\n"
      "debug.replay(folder, step, state_of(nn.Linear(2, 1)), batches, update=5)",
      "checkpoint(folder"),
    F("there is no pair of neighbouring checkpoints",
      "import shutil\n"
      "shutil.rmtree(folder, ignore_errors=True)\n"
      "fit(step, state, batches, epochs=2, hooks=(«checkpoint(folder, keep=1)»,))\n"
      "debug.verify(folder, step, state_of(nn.Linear(2, 1)), batches)",
      "checkpoint("),
    F("cannot be copied, so its average cannot be evaluated",
      "class Uncopied(nn.Linear):\n"
      "    def __deepcopy__(self, memo):\n"
      "        raise TypeError('no')\n"
      "state = state_of(Uncopied(2, 1))\n"
      "fit(pipeline(«ema(0.9)»)(loss_fn), state, (train, valid))",
      "ema(", {"...": "0.9"}),
    F("cannot be restored into this",
      "save(state, path) if not fl.latest(path) else None\n"
      "x = batch\n"
      "model = nn.LazyLinear(1)\n"
      "state = TrainState.create(model, sgd(model))\n"
      "«»\n"
      "restore(path, state)",
      "model("),
    F("Make them in the shapes that they had, or take the shapes of the file",
      "latest(path) or save(fit(pipeline()(loss_fn), adam_of(nn.Linear(2, 1)), batches), path)\n"
      "restore(path, adam_of(nn.Linear(2, 3)), only=('optimizer',), «strict=True»)",
      "shapes=", then="leaves the model out"),
    F('take the shapes of the file, with shapes="file", ',
      "latest(path) or save(state_of(nn.Linear(2, 1)), path)\n"
      "restore(path, state_of(nn.Linear(2, 3)), «strict=True»)",
      "shapes="),
    F("name no metric: write best(",
      "latest(folder) or fit(step, state, (train, valid), hooks=(checkpoint(folder),))\n"
      "«best(folder)»"),
    F("To take one that is not finite all the same",
      "torch.nn.init.constant_(model.weight, math.nan)\n"
      "if not folder_exists(folder):\n"
      "    fit(step, state, batches, hooks=(checkpoint(folder),))\n"
      "path = [*Path(folder).glob('step-*')][0]\n"
      "state = state_of(nn.Linear(2, 1))\n"
      "«state = resume(folder, state)»",
      "state = restore("),
    F("To resume runs, save whole checkpoints",
      "import shutil\n"
      "shutil.rmtree(folder, ignore_errors=True)\n"
      "fit(step, state, batches, hooks=(«checkpoint(folder, only=('model',))»,))\n"
      "resume(folder, state_of(nn.Linear(2, 1)))",
      "checkpoint(folder)"),
    F("Checkpoints are written by fit(..., hooks=",
      "state = state_of(model)\n"
      "«»\n"
      "debug.verify(folder, step, state, batches, spans=0)",
      "fit(", {"fit(...": "state = fit(step, state, batches"}),
    F("Choose a reduction in it, such as average=",
      "import torchmetrics\n"
      "f1 = torchmetrics.classification.MulticlassF1Score(3, «average=None»)\n"
      "inputs = lambda aux, batch: (torch.zeros(3).long(), torch.zeros(3).long())\n"
      "fit(pipeline(metric(f1=from_torchmetrics(f1, inputs)))(loss_fn), state, batches)",
      "average="),
    F("from_torchmetrics expects a torchmetrics.Metric",
      "from torchmetrics.classification import MulticlassF1Score\n"
      "from_torchmetrics(«3», lambda aux, batch: ())",
      "MulticlassF1Score"),
    F("metric expects a name for",
      "import torchmetrics\n"
      "f1 = torchmetrics.MeanMetric()\n"
      "inputs = lambda aux, batch: (batch,)\n"
      "fit(pipeline(«metric(from_torchmetrics(f1, inputs))»)(loss_fn), state, batches)",
      "metric(", {"...": "f1, inputs"}),
    F('give each group["name"] once',
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "groups = [{'params': one.parameters(), 'name': 'a', 'lr': 0.1} for one in two]\n"
      "for i, group in enumerate(groups):\n"
      "    «group['name'] = 'a'»\n"
      "TrainState.create(two, torch.optim.SGD(groups, lr=0.1))",
      'group["name"]', {'group["name"]': 'group["name"] = str(i)'}),
    F("in no optimizer: ",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "«»\n"
      "TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])})",
      "requires_grad_", {"requires_grad_": "two[2].requires_grad_"}),
    F("Train them to the same one first",
      "other = fit(step, snapshot(state), batches)\n"
      "«»\n"
      "stack({'a': state, 'b': other})",
      "fit(", {"fit(...": "state = fit(step, state, batches", "steps=...": "steps=4"}),
    F("with records at the same updates",
      "other = fit(step, snapshot(state), batches, hooks=())\n"
      "state = fit(step, state, batches, record_every=every(steps=2))\n"
      "states = [state, other]\n"
      "for i, state in enumerate(states):\n"
      "    states[i] = «state»\n"
      "stack(dict(zip('ab', states)))",
      "attrs.evolve"),
    F("wrap it in a DataLoader, with batch_size=None",
      "from torch.utils.data import TensorDataset\n"
      "dataset = TensorDataset(torch.ones(4, 3, 2))\n"
      "step = pipeline()(lambda model, batch: model(batch[0]).mean())\n"
      "batch_size = None\n"
      "fit(step, state, «dataset»)",
      "batch_size=", {"batch_size=None": "DataLoader(dataset, batch_size=None)"}),
    F("; to stop at once: halt_on_nonfinite(",
      "nan = [batch * math.nan] * 4\n"
      "hooks = («halt_on_nonfinite()»,)\n"
      "state = fit(step, state, nan, hooks=hooks)\n"
      "assert state.step == 1, state.stop",
      "halt_on_nonfinite(steps=1)"),
    F("or give a target in epochs, fit(",
      "step = pipeline()(lambda model, batch: skip('never'))\n"
      "«fit(step, state, batches, steps=3)»",
      "fit(", {"fit(...": "fit(step, state, batches", "epochs=...": "epochs=3"}),
    F("Write pipeline(\0)(loss_fn)",
      "fit(«clip(1.0)», state, batches)"),
    F("Write pipeline()(loss_fn)",
      "fit(«3», state, batches)",
      "pipeline()"),
    F("begun at step",
      "halt = every(steps=2)(lambda state: attrs.evolve(state, stop='interrupted'))\n"
      "state = fit(step, state, batches, epochs=2, phase='a', hooks=(halt,))\n"
      "state = attrs.evolve(state, stop=None)\n"
      "state = «state»\n"
      "fit(step, state, batches, phase='b')",
      "attrs.evolve"),
    F("the phases are out of order",
      "go = lambda state, name: fit(step, state, batches, phase=name)\n"
      "latest(path) or save(go(go(state, 'a'), 'b'), path)\n"
      "state = restore(path, state_of(nn.Linear(2, 1)))\n"
      "state = «state»\n"
      "state = go(state, 'b')\n"
      "go(state, 'a')",
      "fit(", {"...": "step, state, batches"}),
    F("Write one that returns the state",
      "class Mine:\n"
      "    def begin(self, state):\n"
      "        return state\n"
      "    «def other(self, state)»:\n"
      "        return state\n"
      "fit(step, state, batches, hooks=(Mine(),))",
      "__call__", {"__call__(": "def __call__(self, "}),
    F("tbptt cuts all tensors of a batch along dim",
      "x = torch.ones(3, 4, 2), torch.ones(3, 2)\n"
      "def loss_fn(model, batch, carry):\n"
      "    return model(batch[0]).mean(), {}, carry\n"
      "x, y = x\n"
      "step = pipeline(tbptt(2, dim=1))(loss_fn)\n"
      "fit(step, state, [(x, «y»)])",
      "x.unbind", {"x.unbind(1)": "y.unbind(1)"}),
    F("closure() and closure(create_graph=True) are both listed",
      "pipeline(«closure(), closure(create_graph=True)»)(loss_fn)",
      "closure(create_graph"),
    F("put x.expand(n, *x.shape) into the batch",
      "step = pipeline(microbatch(2))(lambda model, batch: model(batch[0]).mean())\n"
      "n, x = 4, torch.ones(5, 2)\n"
      "fit(step, state, [(torch.ones(4, 2), «x»)])",
      "x.expand"),
    F("name one of these in using(",
      "two = nn.Sequential(nn.Linear(2, 1), nn.Linear(2, 1))\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])})\n"
      "step = pipeline(using(«'a'»))(lambda model, batch: model[1](batch).mean())\n"
      "fit(step, state, batches)",
      "using(", {"using(...)": "'b'"}),
    F("would both be evaluated alone",
      "pipeline(ema(0.9, evaluate='only'), ema(0.99, name='slow', «evaluate='only'»))(loss_fn)",
      "evaluate=", {'evaluate="only"': ""}),
    F("alternate: batch lacks",
      "alternate({'a': step, 'b': step}, «batch={'a': 'next'}»)",
      "batch=", {"...": "same"}),
    F("has the name of a step, and the metrics of both",
      "pipeline(ema(0.9, «name='a'»))(alternate({'a': step, 'b': step}))",
      "name=", {"...": "slow"}),
    F("but each of the steps",
      "«pipeline(clip(1.0))(alternate({'a': step, 'b': step}))»",
      "pipeline(clip", {"...": "loss_fn"}),
    F("made no gradient. With updates=False",
      "def fn(state, batch):\n"
      "    loss = state.model(batch).mean()\n"
      "    «loss»\n"
      "    return Output(loss.detach(), 3)\n"
      "fit(raw(fn, updates=False), state, batches)",
      "loss.backward"),
    F("which with updates=False the step itself does",
      "def fn(state, batch):\n"
      "    loss = state.model(batch).mean()\n"
      "    loss.backward()\n"
      "    state.optimizer.step()\n"
      "    state.optimizer.zero_grad()\n"
      "    return Output(loss.detach(), 3)\n"
      "fit(«raw(fn, updates=False)», state, batches)",
      "raw("),
    F("must return an Output with skip=",
      "def fn(state, batch):\n"
      "    return Output(torch.zeros(()), 3, «skip=True»)\n"
      "fit(raw(fn), state, batches)",
      "skip="),
    F("has ended before its length",
      "class Lying:\n"
      "    def __len__(self):\n"
      "        return 9\n"
      "    def __iter__(self):\n"
      "        return iter(batches)\n"
      "fit(step, state, interleave({'a': Lying()}, «None»))",
      "ratios=", {"...": "'a': 1"}),
    F("a function (step, total_steps) -> factor, such as cosine()",
      "schedules.warmup(2)(«3»)",
      "cosine()"),
    F("a Problem, such as small()",
      "law_fold(pipeline(), «3»)",
      "small()"),
    F("a middleware, such as accumulate(1)",
      "law_neutral(«3», pipeline(), small())",
      "accumulate("),
    F("or save without the optimizer, only=(",
      "class Half(nn.Linear):\n"
      "    def state_dict(self, *args, **kwargs):\n"
      "        found = super().state_dict(*args, **kwargs)\n"
      "        return {name: found[name] for name in found if 'bias' not in name}\n"
      "    def load_state_dict(self, given, *args, **kwargs):\n"
      "        return super().load_state_dict({**super().state_dict(), **given}, *args, "
      "**kwargs)\n"
      "fit(step, state_of(Half(2, 1)), batches, hooks=(checkpoint(folder, «keep=1»),))",
      "only=", {"...": "'counters'"}),
    F("evaluates the loss by itself, so an update cannot be made with another",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "lbfgs = torch.optim.LBFGS(two[1].parameters())\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': lbfgs})\n"
      "fit(pipeline(«»)(loss_fn), state, batches)",
      'using("'),
    F("changes its window with the",
      "alternate({'a': pipeline(«accumulate({0: 1, 2: 2})»)(loss_fn)})",
      "accumulate(n", {"(n)": "(2)"}),
    F("alternate has a step for",
      "two = model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "step = alternate({'a': step, 'b': step})\n"
      "fit(step, «state_of(two)», batches)",
      "TrainState.create", {"'a': ...": "'a': sgd(two[0])", "'b': ...": "'b': sgd(two[1])"}),
    F("is of other parts of the model than only= chooses",
      "state = fit(pipeline(ema(0.9))(loss_fn), state, batches)\n"
      "state = «state»\n"
      "fit(pipeline(ema(0.9, only='weight'))(loss_fn), state, batches, epochs=2)",
      "attrs.evolve"),
    F(', or write \0(..., on="evaluation")',
      "fn = lambda aux, batch: batch.mean()\n"
      "update = lambda state, batch: Output(torch.zeros(()), len(batch))\n"
      "pipeline(«metric(a=fn)»)(raw(update, evaluate=loss_fn))",
      "metric(...", {"...": "a=fn"}),
    F('\0: write amp("bf16")',
      "def fn(state, batch):\n"
      "    loss = state.model(batch).mean()\n"
      "    loss.backward()\n"
      "    return Output(loss.detach(), 3)\n"
      "fit(pipeline(«amp('fp16')»)(raw(fn, updates=False)), state, batches)",
      'amp("bf16'),
    F("write grad_norm()",
      "state = stack({'a': state, 'b': snapshot(state)})\n"
      "fit(pipeline(«grad_norm(by='module')»)(loss_fn), state, batches)",
      "grad_norm()"),
    F("does not train a stack of models, whose loss function",
      "state = stack({'a': state, 'b': snapshot(state)})\n"
      "update = lambda state, batch: Output(torch.zeros(()), len(batch))\n"
      "fit(«raw(update)», state, batches)",
      "pipeline(", {"...": ""}),
    F("call it through fit(step, state, loaders, steps=...)",
      "«cosine()(0, None)»",
      "fit(", {"...": "3"}),
    F("but this state has several: say which one, using(",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "state = TrainState.create(two, {'a': sgd(two[0]), 'b': sgd(two[1])})\n"
      "fit(pipeline(«grad_norm()», closure())(loss_fn), state, batches)",
      "using("),
    F("goes back with every optimizer: write then=",
      "two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))\n"
      "pipeline(using('a'), spike_guard(«then='back'»))(loss_fn)",
      "then="),
    F("goes back with the whole model: write then=",
      "alternate({'a': pipeline(spike_guard(«then='back'»))(loss_fn), 'b': step})",
      "then="),
    F("Write \0 names in metric(",
      "from torchmetrics.classification import MulticlassF1Score\n"
      "f1 = MulticlassF1Score(3, average=None)\n"
      "inputs = lambda aux, batch: (torch.zeros(3).long(), torch.zeros(3).long())\n"
      "fit(pipeline(«metric(f1=from_torchmetrics(f1, inputs, names=('a', "
      "'b')))»)(loss_fn),state, batches)",
      "metric(", {"...=": "f1=", "(...,": "(f1, inputs,", "(...)": "('a', 'b', 'c')"}),
    F("a gradient is sparse,",
      "class Words(nn.Module):\n"
      "    def __init__(self):\n"
      "        super().__init__()\n"
      "        self.table, self.head = nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1)\n"
      "    def forward(self, batch):\n"
      "        return self.head(self.table(batch.long()))\n"
      "fit(pipeline(«clip_value(1.0)»)(loss_fn), state_of(Words()), batches)",
      "clip("),
]  # fmt: skip

# Why a message is not followed, and how such messages begin, with {} for a value.
NOT_FOLLOWED = {
    "needs several processes, a sharded model, a launcher or accelerate": [
        "each has the data in another order.",
        "data expects one dimension of a mesh of",
        "Middleware and hooks must",
        "another process has ended",
        "process {} has waited {} s",
        "some parameters of this",
        "the parameter {} is placed",
        "parallelize_module has",
        "Write Accelerator(cpu=True)",
        "Accelerate does not read",
        "this process is one of",
        "accelerate is configured for FSDP,",
        "accelerate is configured for mixed_precision={};",
        "the name of this machine,",
        "SLURM: this is task {} of",
        "this model is in DistributedDataParallel",
        "Give TrainState.create",
        "{} tells DistributedDataParallel",
        "write find_unused_parameters=True",
        "leave it out; to deal the",
        "the optimizer{} has other",
        "this state was trained",
        "averaged: a model that",
        "stack works in one process,",
        "state.items is over all",
        "a dimension of a mesh,",
        "data expects one dimension of a mesh,",
        "a model that is sharded",
        "What a hook or a middleware",
        "{} distributes the batches of its",
        "accumulate(total={}) distributes the batches of each",
        "each has the data in another order,",
        "processes {} and {} have",
        "process 0 and process {}",
        "even(loader) leaves out",
        " With even(loader), an epoch",
        "the loader has a DistributedSampler,",
        "{} would call the model on",
        "fit: the {} loader has {} in",
        "retry_on_oom cannot repeat",
        "local_sgd expects outer",
        'keeps state.slots["{}"],',
        "its turns share a window.",
        "{}: the average of a model",
        "{} does not work with TrainState.create(...,",
        "there was no memory left",
        "the loss uses some parameters",
        "so far each batch weighed",
        "{} exchanges data with the",
        "exact=True: the loss function changes",
        "exact=True cannot sum sparse",
        "restore: this run had exact=True,",
        "restore: this run had no",
        "exact=True: {} keeps running",
        "exact=True: the loss function exchanges",
        "accumulate(dtype={}) does",
        "exact=True needs one order",
        "{}. Leave exact=True out",
        "copies the model, and one that is sharded",
        "computes norms of whole parameters",
    ],
    "is followed in tests/test_configurations.py": [
        "the DictConfig that Hydra makes",
    ],
    "is done in tests/debug/test_without.py, which makes runs of two steps and keeps all": [
        "without leaves a batch out of one update,",
        "without: the phase {} began",
        "without: the run does not",
        "without: there is no checkpoint",
    ],
    "leaves to the user which value, layer or data to choose": [
        "the model has lazy parameters,",
        "a metric of a run such",
        "what it does depends on",
        'throughput(flops="count"):',
        'throughput(of="samples")',
        "; or write metric(...,",
        'the aux["weight"] of {} depends',
        "find_lr varies one learning",
        "{}: {} of a sample have the",
        "{} expects {} as sequences",
        "plot expects at least one",
        "a Problem, such as small(),",
    ],
    "is a part of a message, which the rest makes a sentence": [
        "leave it out, and list",
        "A scheduler of torch has",
        '{}: given=("{}",) would not',
        ", or give the collection",
        "such as fork(state, {'lr':",
        "{}. List microbatch(size)",
        'write then="stop", and',
        "write the hook halt_on_nonfinite()",
        "write clip(...)",
        'write amp("bf16")',
        "write microbatch(size)",
        "begin a phase, which has",
        ", relative=True",
        '{"d": pipeline()(d_loss),',
        "would repeat {}: list microbatch(size)",
    ],
    "needs a loader, an optimizer, a file or a memory that fails in a rare way": [
        "{} lacks the older records",
        "{} could not be removed ({}).",
        "the checkpoint has a {} where",
        "the update of this state",
        "the optimizer {} has parameters",
        "{}.state_dict() does not",
        "the loader was given the",
        "Its order comes from a",
        'state.slots["{}"] has no',
        "To continue, raise the",
        "{} made a {} that counts epochs,",
        "{}: its {} was made for {} parameter",
        "{}: an evaluation needs memory",
        "no memory left for {} samples",
        "a kernel that is not deterministic",
        "replay: {} does not say how",
    ],
    "names a call or a setting, and gives no advice": [
        "restore expects a path;",
        "save: the position of the",
        "the weights of a mean are",
        "the call that made it,",
        "fit: {}.state_dict() does",
        "the times that timings()",
        "what throughput() measures",
        "what device_memory() measures",
        "fit: {}.state_dict() raised",
        "to continue: fit again",
        "while in {}(client, state)",
        "tbptt cuts the tensors",
        "{}: start={} is update {} of",
        "throughput expects flops,",
        "{}: its {} was made for a run",
        "Using backward\\(\\) with",
        "every parameter of the",
        "each of them has requires_grad=False",
        "; in evaluation: {}(model,",
        "{}. Is {} under torch.no_grad()?",
        '{}, by aux["weight"]',
        "LrRange: suggestion lr={},",
        "{} inner modules are not",
        "leave_out expects predicate",
        "not checked: {} takes no",
        "join expects rising boundaries;",
        "{} expects pipe as what pipeline(...)",
        "a tensor was read to the",
    ],
    "says what to leave out, and shows nothing to paste": [
        "one update after a restore, {}: a loader",
        ": a loader whose batches",
        '{}: group["{}"] is {}, but the',
        'state.slots["{0}"] is from',
        'alternate(batch="late")',
        "accumulate: by= says what",
        "{} changes gradients in place,",
        "{} clips all parameters,",
        "skip_nonfinite: of the",
        "alternate: order={} leaves",
        "leave the buffer out, with",
        "{}.step takes no closure:",
    ],
    "tells the author of a module, whose forward only they know": [
        "{} cannot be called for a stack of models: it puts",
    ],
    "tells the author of a middleware or hook, whose code only they know": [
        "parts, such as Part.of_slot(...)",
        "{} cannot capture an update",
        "the update cannot be captured:",
        "Inside it nothing may be",
        "A tensor from outside the",
        "return {} from numbers(state)",
        "name the moments: moments",
        "list the hook without every(...)",
        "give fit the state without",
        "list requeue(), which ends",
        "{graph!r} cannot capture retry_on_oom,",
        "{} must return {}; got loss={}",
        "{} must return {}{}; got weight={}",
        "{} must return metrics such",
        "decide is about whole updates,",
    ],
    "needs a GPU, a captured graph or a compiled update": [
        "the gradient of an embedding",
        "{} reads its learning rate",
        "fit: tip: {}(..., fused=True)",
        "fit: {} updates one parameter",
        "fit: pin_memory=True of",
        "fit: this CPU only emulates",
        "{} calls the optimizer with",
        "{} evaluates the loss itself,",
        "compiled(update=True) compiles",
        "{} captures the whole update,",
        "To compile the loss function",
        "To run such a step eagerly,",
        "{} makes CUDA graphs of its",
        "works in one process only:",
        "{}: the loss itself is not",
        'amp("fp16") needs parameters',
        "model.to(memory_format=torch.channels_last)",
        "accelerate is configured for fp16,",
    ],
}
