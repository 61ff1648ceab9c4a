"""A table of the modules of a model: shapes, parameters, memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import attrs
from torch import Tensor, nn

from fnloop._core.state import TrainState, unwrap
from fnloop._core.view import evaluating
from fnloop.extend import Batch, check_not_stale, checks, containers, tables

SHAPES = 2  # outputs of a module that are shown
_HINT = (
    "summary calls model(x) for a batch (x, y), model(**batch) for a mapping, and model(batch) for "
    "anything else. Give it a batch that fits, such as summary(state, (inputs,)) or "
    'summary(state, {"name of an argument": inputs})'
)


@attrs.frozen
class ModuleRow:
    """A module in a :class:`Summary`, with all that it contains.

    Args:
        name: its path in the model; "" for the model itself.
        kind: the name of its class.
        output: the shape of its output, as text; "not called" if it has no modules inside it and
            was not called, as one whose weight alone is used.
        calls: how often it was called.
        parameters: how many parameters it has; a tied one counts where it comes first.
        trained: how many of them require gradients.
        weight_bytes: the memory of its parameters and buffers.
        output_bytes: the memory of the outputs of its innermost modules.
    """

    name: str
    kind: str
    output: str
    calls: int
    parameters: int
    trained: int
    weight_bytes: int
    output_bytes: int

    @property
    def depth(self) -> int:
        """How many modules it is inside of."""
        return self.name.count(".") + 1 if self.name else 0


@attrs.frozen(repr=False)
class Summary(tables.Shown):
    """What :func:`summary` returns: a table as text, and in a notebook as HTML.

    Args:
        rows: one for each module, the model itself first.
        tied: the other names of parameters that are used under several.
        depth: how many levels the table shows.
    """

    rows: tuple[ModuleRow, ...]
    tied: Mapping[str, str]
    depth: int

    def _parts(self) -> list[tables.Table[ModuleRow]]:
        shown = [row for row in self.rows if row.depth <= self.depth]
        notes = [f"{other} is {name}, and counts once" for other, name in self.tied.items()]
        if hidden := len(self.rows) - len(shown):
            notes.append(f"{hidden} inner modules are not shown: give depth={self.depth + 1}")
        return [tables.Table(_COLUMNS, shown, "; ".join(notes))]


def _name(row: ModuleRow) -> str:
    return "  " * row.depth + (row.name.rpartition(".")[2] or "model")


def _output(row: ModuleRow) -> str:
    return row.output + (f" ×{row.calls}" if row.calls > 1 else "")


def _number(row: ModuleRow) -> str:
    return f"{row.parameters:,}" if row.parameters else ""


def _trained(row: ModuleRow) -> str:
    known = {0: "no", row.parameters: "yes"}.get(row.trained, f"{row.trained:,}")
    return known if row.parameters else ""


def _memory(nbytes: int) -> str:
    return tables.format_bytes(nbytes) if nbytes else ""


_COLUMNS: list[tables.Column[ModuleRow]] = [
    tables.Column("module", _name, left=True),
    tables.Column("class", lambda row: row.kind, left=True),
    tables.Column("output", _output, left=True),
    tables.Column("number", _number, "parameters", rank=(1, 1)),
    tables.Column("trained", _trained, "parameters", rank=(2, 2)),
    tables.Column("weights", lambda row: _memory(row.weight_bytes), "memory", rank=(3, 3)),
    tables.Column("outputs", lambda row: _memory(row.output_bytes), "memory", rank=(4, 4)),
]


def summary(state: TrainState, batch: Batch, *, depth: int = 3) -> Summary:
    """Show the modules of a model: the shapes of their outputs, parameters, memory.

    The model is called once, in evaluation mode and without gradients: ``model(x)`` for a batch
    ``(x, ...)``, a tuple or a list; ``model(**batch)`` for a mapping; ``model(batch)`` for anything
    else. Nothing changes: modes, buffers and random generators are as before. Training needs more
    memory: for gradients, for the state of the optimizer, and for what backward keeps.

    A module that is called several times is one row, which shows the shape of its first output and
    the number of calls. A parameter that is used in several modules counts in the first.

    Args:
        state: the newest state.
        batch: a batch, on any device.
        depth: how many levels of modules inside modules the table shows. A row includes what it
            contains.

    Returns:
        The table, with its ``rows``.

    Raises:
        StaleStateError: the state has been advanced.
        TypeError, ValueError: an argument has the wrong type or value, or a lazy module has not
            seen a batch yet.
        Exception: any exception of the model, with a note of how it was called.

    Example:
        >>> import fnloop as fl, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
        >>> state = fl.TrainState.create(model, torch.optim.SGD(model.parameters()), seed=0)
        >>> summary(state, torch.ones(2, 4))
                                   │ parameters      │ memory
        module  class       output │ number  trained │ weights  outputs
        model   Sequential  [2, 8] │     40      yes │   160 B    128 B
          0     Linear      [2, 8] │     40      yes │   160 B     64 B
          1     ReLU        [2, 8] │                 │             64 B

    Replaces: lightning.ModelSummary, keras.summary
    """
    __tracebackhide__ = True
    check_not_stale(state, "summary")
    depth = checks.integer("summary", "depth", depth, "the levels of modules to show")
    model = unwrap(state)
    weights = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, t in weights if nn.parameter.is_lazy(t)]
    if lazy:
        raise ValueError(
            f"summary: the sizes of {checks.join_names(lazy)} are not known yet: call the model on "
            "a batch before TrainState.create"
        )
    with evaluating(state), _watched(model) as calls:
        try:
            _call(model, containers.to_device(batch, state.backend.device))
        except Exception as error:
            error.add_note(_HINT)
            raise
    tied = _tied(model)
    return Summary(tuple(_rows(model, calls, tied)), tied, depth)


def _call(model: nn.Module, batch: Batch) -> None:
    __tracebackhide__ = True
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list) and batch:
        model(batch[0])
    else:
        model(batch)


@attrs.define
class _Calls:
    """The calls of a module: how many, the first output, and the memory of all outputs."""

    number: int = 0
    output: str = ""
    nbytes: int = 0

    def add(self, output: object) -> None:
        found = list(containers.tensors_in(output))
        if not self.number:
            shapes = [str([*t.shape]) for t in found[:SHAPES]]
            more = [f"and {len(found) - SHAPES} more"] if len(found) > SHAPES else []
            self.output = ", ".join([*shapes, *more]) or type(output).__name__
        self.number += 1
        self.nbytes += sum(t.nbytes for t in found)


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, _Calls]]:
    """Note what the modules return, by their names."""
    calls = {name: _Calls() for name, _ in model.named_modules()}

    def noting(name: str) -> Callable[[nn.Module, object, object], None]:
        return lambda module, given, output: calls[name].add(output)

    with contextlib.ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_hook(noting(name)).remove)
        yield calls


def _tied(model: nn.Module) -> dict[str, str]:
    """Return the other names of parameters with several, and their first."""
    first: dict[int, str] = {}
    found: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(p), name) != name:
            found[name] = first[id(p)]
    return found


def _rows(
    model: nn.Module, calls: Mapping[str, _Calls], tied: Mapping[str, str]
) -> Iterator[ModuleRow]:
    """Yield the row of each module, which includes what the module contains."""
    modules = dict(model.named_modules())
    leaves = {name for name, module in modules.items() if not any(True for _ in module.children())}
    called = {name for name in modules if calls[name].number}
    innermost = called - {outer for name in called for outer in _outer(name)}
    parameters = {name: p for name, p in model.named_parameters() if name not in tied}
    weights: dict[str, Tensor] = {**parameters, **dict(model.named_buffers())}
    for name, module in modules.items():

        def inside(path: str, name: str = name) -> bool:
            return not name or path == name or path.startswith(f"{name}.")

        own = [p for path, p in parameters.items() if inside(path)]
        yield ModuleRow(
            name, type(module).__name__,
            calls[name].output or ("not called" if name in leaves else ""), calls[name].number,
            parameters=sum(p.numel() for p in own),
            trained=sum(p.numel() for p in own if p.requires_grad),
            weight_bytes=sum(t.nbytes for path, t in weights.items() if inside(path)),
            output_bytes=sum(calls[path].nbytes for path in innermost if inside(path)),
        )  # fmt: skip


def _outer(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module."""
    while name:
        name = name.rpartition(".")[0]
        yield name
