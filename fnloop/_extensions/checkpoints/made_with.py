"""What a run was made with: the step, the code of its functions, the device, and the hooks."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FunctionType

import torch
from torch import nn

from fnloop._core.code import codes_of, is_of_library, walk
from fnloop._hooks.hook import Hook, LiftedHook, every_layer, slots_of, unwrap_hook
from fnloop._step.pipeline import PipelineStep
from fnloop.extend import name_of

PACKAGE = str(Path(__file__).parents[2])
INSTALLED = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "purelib", "platlib")})


def is_users(module: str | None) -> bool:
    """Return whether a module is neither installed nor a part of Python or of fnloop."""
    if module in (None, "builtins"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    return not file.startswith((*INSTALLED, PACKAGE))


def describe_making(
    step: PipelineStep, model: nn.Module, device: torch.device | str, hooks: Sequence[Hook]
) -> dict[str, object]:
    """Return what a run is made with, as its checkpoints keep it.

    Its functions are those that the step was given, the classes of the modules, and what these
    refer to, as far as a user wrote it. Each has a hash, by its name.
    """
    changing = filter(_may_change, hooks)
    return {
        "step": _without_addresses(repr(step)),
        "device": device_name(device),
        "functions": _hashes(step, model),
        "hooks": [_without_addresses(name_of(unwrap_hook(hook))) for hook in changing],
        "hook_slots": sorted(slots_of(hooks)),
    }


def _without_addresses(text: str) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _may_change(hook: Hook) -> bool:
    """Return whether a hook may change weights: a user's, or one that keeps something."""
    inner = unwrap_hook(hook)
    own = inner.call if isinstance(inner, LiftedHook) else inner
    kind = own if isinstance(own, FunctionType) else type(own)
    return not is_of_library(kind) or any(layer.slot is not None for layer in every_layer((hook,)))


def device_name(device: torch.device | str) -> str:
    """Return what computes on a device: of a CPU, also how many threads, as sums depend on it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    kind = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"cpu ({kind}, {torch.get_num_threads()} threads)"


# --- the functions


def _given(step: PipelineStep) -> Iterator[object]:
    """Yield what a step was given: its functions, and the settings of its middleware."""
    for one in (step, *step.turns.values()):
        yield from one.functions
    for member in step.members:
        call = member.call
        if call is None:  # not made by a factory
            yield from (wrap for ring, wrap in member.wraps.items() if ring != "evaluation")
        else:
            yield from (call.factory, *call.args, *call.kwargs.values())


def _hashes(step: PipelineStep, model: nn.Module) -> dict[str, str]:
    given = [*_given(step)]
    classes = {cls: None for m in model.modules() for cls in type(m).__mro__}

    def enters(value: object) -> bool:  # also of a package of the user's that is installed
        return is_users(value.__module__) or any(value is one for one in given)

    found: dict[str, list[str]] = {}
    for value in walk((*given, *classes), enters):
        if isinstance(value, FunctionType) and enters(value) and not is_of_library(value):
            found.setdefault(value.__qualname__, []).append(hash_of(value))
    return {name: "+".join(sorted(hashes)) for name, hashes in sorted(found.items())}


def hash_of(function: FunctionType) -> str:
    """Return a hash of the source of a function; where there is none, of its code.

    Example:
        >>> one, other, same = eval("lambda x: x"), eval("lambda x: -x"), eval("lambda x: x")
        >>> hash_of(one) == hash_of(same), hash_of(one) == hash_of(other)
        (True, False)
    """
    text = ""
    # Under the name of what eval makes, Python 3.13 finds the text of `python -c` instead.
    if function.__code__.co_filename != "<string>":
        # Not if it was typed into a console, or the file was edited and cannot be parsed there
        with contextlib.suppress(Exception):
            text = inspect.getsource(function)
    text = text or "".join(map(_code_text, codes_of(function.__code__)))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _code_text(code: CodeType) -> str:
    constants = [  # a set has another order in each process
        sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant
        for constant in code.co_consts
        if not isinstance(constant, CodeType)
    ]
    return repr((code.co_code, constants, code.co_names))
