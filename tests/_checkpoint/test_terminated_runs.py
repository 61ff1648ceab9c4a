"""A run with workers that is sent SIGTERM twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "attempts"), [("training", 5), ("evaluation", 2)])
def test_a_run_with_workers_is_saved_if_it_is_terminated_twice(moment, attempts, tmp_path):
    """All processes of the run get both signals. The second kills its workers as it saves."""
    script = Path(__file__).parents[1] / "helpers" / "terminated.py"
    out = subprocess.run(
        [sys.executable, str(script), str(tmp_path), moment, str(attempts)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    ended = [json.loads(line) for line in out.splitlines()]
    assert len(ended) == attempts
    for end in ended:
        assert (end["status"], end["error"], end["stop"]) == (0, "", "SIGTERM")
        assert end["saved"] == end["step"] >= 2
        # Also in the evaluation of the first epoch, which a resumed run repeats
        assert end["epoch"] == 0
