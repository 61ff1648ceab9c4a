"""The buffer of the page about a replay buffer, in a script that is killed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import fnloop as fl

PAGE = Path(fl.__file__).parents[1] / "notebooks" / "how_to" / "save_a_replay_buffer.md"
SCRIPT = """
def killed_at(last):
    def kill(state):
        if state.step == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return state
    return fl.every(steps=1)(kill)

import json, sys
state = script(killed_at(int(sys.argv[1])))
buffer = state.slots["replay"]
weights = {name: w.tolist() for name, w in state.model.state_dict().items()}
print(json.dumps([state.step, buffer.added, buffer.x.tolist(), buffer.y.tolist(), weights]))
"""


def run(folder, kill_at):
    cells = re.findall(
        r"^```\{code-cell\} python\n(.*?)^```$", PAGE.read_text("utf-8"), re.S | re.M
    )
    cells = [re.sub(r"\A(?::.*\n)+", "", cell) for cell in cells]
    chosen = [cell for cell in cells if not re.search(r"^(plain|cut) =|^sorted", cell, re.M)]
    (tail,) = (cell for cell in cells if re.search(r"^cut =", cell, re.M))
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text("\n".join([*chosen, tail.partition("cut =")[0], SCRIPT]))
    command = [sys.executable, "script.py", str(kill_at)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_run_that_was_killed_twice_ends_with_the_bits_of_the_whole_one(tmp_path):
    ends = [run(tmp_path / "cut", at).returncode for at in (37, 81)]
    assert ends == [-signal.SIGKILL] * 2
    assert fl.latest(tmp_path / "cut" / "runs" / "replay").name == "step-00000075"
    cut, whole = (json.loads(run(tmp_path / name, 0).stdout) for name in ("cut", "whole"))
    assert cut == whole and cut[:2] == [100, 2000]
