"""Give a SLURM job back to its queue before its time is over."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping

import attrs

from fnloop._backend.public import broadcast
from fnloop._core.call import Call
from fnloop._core.events import END
from fnloop._core.state import TrainState
from fnloop._core.stops import ends_job
from fnloop._display.log import log
from fnloop._hooks.wrapper import Hook

__all__ = ["requeue"]

SCONTROL_SECONDS = 60  # how long ``scontrol`` may take
_OUTSIDE = "requeue: this is not a SLURM job (SLURM_JOB_ID is not set): SIGUSR1 only saves"


@attrs.frozen(repr=False, eq=False)
class requeue(Hook):
    """Requeue a SLURM job when its time is nearly over: ``#SBATCH --requeue --signal=USR1@120``.

    On SIGUSR1 the run ends as on SIGTERM, after the current update and with ``state.stop ==
    "SIGUSR1"``. ``checkpoint`` saves it, and then the main process calls ``scontrol requeue`` with
    the id of the job. The job starts again, and the same script continues. A job that ends by
    ``time_limit(per="job")`` is requeued too. A run that has reached its target is not.

    Outside of SLURM, the hook only says so, and SIGUSR1 saves as usual. If ``scontrol`` fails, an
    error is logged, and the run ends all the same: its checkpoint is kept.

    List it after ``checkpoint``. ``torchrun`` passes the signal on if it is started with
    ``--signals-to-handle SIGTERM,SIGINT,SIGUSR1 --shutdown-timeout 120``.

    Returns:
        A hook.

    Raises:
        ValueError: when a run begins: no ``checkpoint`` of all parts is listed before it.

    Example:
        >>> import fnloop as fl, tempfile, torch
        >>> from fnloop.testing import toy, toy_loss
        >>> step, batches = fl.pipeline()(toy_loss), [torch.ones(1)] * 4
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     hooks = (fl.every(epochs=1)(fl.checkpoint(folder)), requeue())
        ...     state = fl.fit(step, fl.resume(folder, toy()), batches, epochs=1, hooks=hooks)
        >>> state.step, state.stop
        (4, None)
    """

    _job: list[str] = attrs.field(factory=list, init=False)  # the id, until it is requeued

    def __repr__(self) -> str:
        return repr(Call(requeue, (), {}))

    @property
    def ends_run_on_usr1(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether SIGUSR1 ends the run, and does not only save it: in a SLURM job."""
        return bool(self._job)

    def begin(self, state: TrainState) -> TrainState:
        """Find out which job this is."""
        job = broadcast(_job_of(os.environ))  # the same in every process
        self._job[:] = [] if job is None else [job]
        if job is None and state.backend.main:
            log.info(_OUTSIDE)
        return state

    def __call__(self, state: TrainState) -> TrainState:
        return state

    def flush(self, state: TrainState) -> TrainState:
        """Requeue the job, if it ends before its run does."""
        over = END in state.events and not state.phases  # another phase may follow
        if self._job and ends_job(state.stop) and not over:
            job = self._job.pop()
            if state.backend.main:
                _requeue(job)
        return state


def _job_of(environment: Mapping[str, str]) -> str | None:
    """Return how ``scontrol`` names this job; None outside of SLURM."""
    if array := environment.get("SLURM_ARRAY_JOB_ID"):
        return f"{array}_{environment.get('SLURM_ARRAY_TASK_ID', '')}"
    return environment.get("SLURM_JOB_ID") or None


def _requeue(job: str) -> None:
    """Call ``scontrol requeue``. Log what came of it."""
    command = ["scontrol", "requeue", job]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SCONTROL_SECONDS, check=False
        )
        failed = done.returncode and f"exit status {done.returncode}: {done.stderr.strip()}"
    except (OSError, subprocess.TimeoutExpired) as error:
        failed = str(error)
    if not failed:
        log.info("requeue: the job %s is in the queue again", job)
        return
    log.error(
        "requeue: '%s' failed (%s). The run is saved and ends here: submit the job again",
        *(" ".join(command), failed),
    )
