"""Look at what a step returns in an evaluation, for what a number cannot say."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from fnloop._core.call import Call, name_of
from fnloop._core.events import END
from fnloop._core.monitor import suggestion
from fnloop._core.state import TrainState
from fnloop._core.stops import is_interruption
from fnloop._core.types import Output
from fnloop._display import checks
from fnloop._hooks.moments import Moment, as_moment, show_call
from fnloop._hooks.triggers import every as periodically
from fnloop._hooks.wrapper import Hook, place_of

__all__ = ["inspect"]


@attrs.define
class _Inspection:
    """What a hook waits for, or has been given.

    Args:
        waits: whether the next evaluation is to be kept.
        asked: whether the trigger was asked at this boundary already.
        outputs: those of an evaluation, until the function is called; or None.
        received_at: the place of the last evaluation that was kept.
    """

    waits: bool = False
    asked: bool = False
    outputs: list[Output] | None = None
    received_at: tuple[int, ...] | None = None


@attrs.frozen(repr=False)
class inspect(Hook):
    """Call a function with what the step returned for each batch of an evaluation.

    It is for what a number cannot say: a confusion matrix, pictures of the worst samples. The
    evaluation is the one that the run makes anyway. Where the hook is due and the loader is not
    evaluated, it waits for the next evaluation. Only if it is due ``at_end()``, and the run ends
    where this loader is not evaluated, or because another hook has stopped it after an evaluation,
    is the loader evaluated once more.

    Each ``Output`` has the loss, the weight and the aux that the loss function returned, so return
    there what you want to see, such as the targets. Tensors are copies on the host, and ``metrics``
    is empty. All outputs of the pass are in memory at once: keep aux small for a large loader.

    With several processes, each of them is given the outputs of all, in the order of the batches,
    and calls the function. To call it on the main process only, write ``on_main(inspect(fn))``.

    Args:
        fn: ``(state, outputs) -> None``, called after the record was made, in the order of the
            hooks. The list has one ``Output`` per batch. What it returns is ignored.
        loader: the name of a loader that is evaluated.
        every: when the hook is due. Other evaluations keep nothing.

    Returns:
        A hook.

    Raises:
        TypeError: an argument is not what it should be.
        KeyError: when a run starts: the loader is not evaluated.

    Example:
        >>> import fnloop as fl, torch
        >>> from fnloop.testing import toy
        >>> def loss_fn(model, batch):
        ...     x, target = batch
        ...     score = model(x)
        ...     return (score - target).square().mean(), {"score": score, "target": target}
        >>> def confusion(state, outputs):
        ...     predicted = torch.cat([out.aux["score"] for out in outputs]) > 0
        ...     target = torch.cat([out.aux["target"] for out in outputs]) > 0
        ...     print([[int((predicted[target == t] == p).sum()) for p in (0, 1)] for t in (0, 1)])
        >>> valid = [(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 1.0])),
        ...          (torch.tensor([-1.0]), torch.tensor([0.0]))]
        >>> step, state = fl.pipeline()(loss_fn), toy(w=1.0, lr=0.0)
        >>> state = fl.fit(step, state, (valid, valid), hooks=(inspect(confusion),))
        [[1, 1], [0, 1]]
    """

    fn: Callable[[TrainState, list[Output]], object]
    loader: str = "valid"
    every: Moment = attrs.field(factory=lambda: periodically(epochs=1))
    _now: _Inspection = attrs.field(factory=_Inspection, init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        checks.function("inspect", "fn", self.fn, "a function (state, outputs) -> None", 2)
        checks.text("inspect", "loader", self.loader, "the name of a loader")
        if isinstance(self.every, type) or not hasattr(self.every, "due"):
            raise TypeError(
                "inspect expects every as every(epochs=1), every(steps=100) or when(predicate); "
                f"got {checks.describe(self.every)}"
            )
        if getattr(self.every, "monitors", ()):
            raise TypeError(
                "inspect is asked before the record is made, so every cannot depend on it; got "
                f"{self.every!r}. Write {show_call(self.every, f'inspect({name_of(self.fn)})')}"
            )
        object.__setattr__(self, "every", as_moment(self.every).renew())  # with its own clock

    @property
    def outside(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Where else than after an update it runs."""
        return self.every.outside

    def __repr__(self) -> str:
        given = {} if self.loader == "valid" else {"loader": self.loader}
        given |= {} if self.every == periodically(epochs=1) else {"every": self.every}
        return repr(Call(inspect, (self.fn,), given))

    wants_outputs = True

    def begin(self, state: TrainState) -> TrainState:
        """Begin a run: check that the loader is evaluated in it.

        Raises:
            KeyError: it is not.
        """
        known = () if state.run is None else state.run.evaluated
        if self.loader not in known:
            names = f"those are: {', '.join(known)}" if known else "it evaluates none"
            hint = suggestion(self.loader, known)
            if self.loader == "train":
                hint = '. To look at training data, give it to fit a second time: {"train": train, '
                hint += '"seen": train}'
            raise KeyError(
                f"inspect: the loader {self.loader!r} is not one that this run evaluates; {names}"
                f"{hint}"
            )
        if state.run is not None:
            self.every.check(state.run)
        return state

    def collects(self, state: TrainState, loader: str) -> bool:
        """Return whether the outputs of the evaluation that begins are to be kept."""
        if loader != self.loader:
            return False
        if END in state.events and self._now.received_at == place_of(state):
            return False  # it has those of the model with which the run ends
        due, self._now.asked = self.every.due(state), True
        self._now.waits = self._now.waits or due
        return self._now.waits

    def receive(self, state: TrainState, outputs: Sequence[Output]) -> None:
        """Take the outputs of an evaluation."""
        self._now.outputs, self._now.waits = list(outputs), False
        self._now.received_at = place_of(state)

    def __call__(self, state: TrainState) -> TrainState:
        asked, self._now.asked = self._now.asked, False
        if not asked and self.every.due(state):
            self._now.waits = True
        return self._show(state)

    def poll(self, state: TrainState) -> TrainState:
        """Drop what was kept: a wrapper has decided that the hook is not called."""
        self._now.asked, self._now.outputs, self._now.received_at = False, None, None
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Call the function, if there are outputs. Drop those of an evaluation that was cut."""
        __tracebackhide__ = True
        return state if is_interruption(state.stop) else self._show(state)

    def _show(self, state: TrainState) -> TrainState:
        __tracebackhide__ = True
        if (outputs := self._now.outputs) is not None:
            self._now.outputs = None
            self.fn(state, outputs)
        return state

    def close(self) -> None:
        """Drop what was kept."""
        self._now.waits, self._now.asked, self._now.outputs = False, False, None
        self._now.received_at = None
