"""What pyright and mypy see of the public names: mistakes are found, and a right script has none.

Every function and middleware keeps its signature, so that a wrong keyword, a wrong value and a name
that is misspelt are errors before anything runs, and an editor shows the arguments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RIGHT, WRONG = (ROOT / "tests" / "helpers" / f"typed_{name}.py" for name in ("right", "wrong"))
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "MYPYPATH": str(ROOT)}


def pyright(path):
    """Return the messages of pyright about a file, by the number of the line."""
    settings = {"env": ENVIRONMENT, "cwd": path.parent, "capture_output": True, "text": True}
    command = [sys.executable, "-m", "pyright", "--outputjson"]
    command += ["--pythonpath", sys.executable, path.name]
    found = subprocess.run(command, **settings)
    report = json.loads(found.stdout)
    assert report["summary"]["filesAnalyzed"] == 1, found.stdout
    return {one["range"]["start"]["line"]: one["message"] for one in report["generalDiagnostics"]}


@pytest.mark.slow
def test_pyright_finds_each_planted_mistake_and_no_other():
    lines = WRONG.read_text().splitlines()
    planted = {line: text for line, text in enumerate(lines) if text.endswith("  # wrong")}
    assert len(planted) > 60
    found = pyright(WRONG)
    missed = [text for line, text in planted.items() if line not in found]
    others = [(lines[line], message) for line, message in found.items() if line not in planted]
    assert (missed, others) == ([], [])


@pytest.mark.slow
def test_pyright_finds_no_mistake_in_a_right_script():
    assert pyright(RIGHT) == {}


@pytest.mark.slow
def test_mypy_finds_no_mistake_in_a_right_script(tmp_path):
    command = [sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path), str(RIGHT)]
    found = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
    assert found.stdout == "Success: no issues found in 1 source file\n", found.stdout


# --- what an editor shows


class Editor:
    """A client of pyright's language server, with one open file."""

    def __init__(self, folder, text):
        command = [sys.executable, "-m", "pyright.langserver", "--stdio"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.server = subprocess.Popen(command, env=ENVIRONMENT, cwd=folder, **pipes)
        self.text, self.uri, self.asked = text, (folder / "train.py").as_uri(), 0
        root = {"rootUri": folder.as_uri(), "processId": None, "capabilities": {}}
        self.ask("initialize", **root)
        self.send("initialized")
        document = {"uri": self.uri, "languageId": "python", "version": 1, "text": text}
        self.send("textDocument/didOpen", textDocument=document)

    def send(self, method, **params):
        self._write({"method": method, "params": params})

    def ask(self, method, **params):
        """Return the answer of the server to a request."""
        self.asked += 1
        self._write({"id": self.asked, "method": method, "params": params})
        while True:
            message = self._read()
            if "method" in message and "id" in message:  # the server asks for settings
                items = message["params"].get("items", [])
                python = {"pythonPath": sys.executable}
                answer = [python if one["section"] == "python" else None for one in items]
                self._write({"id": message["id"], "result": answer})
            elif message.get("id") == self.asked and "method" not in message:
                return message["result"]

    def at(self, method, word):
        """Return the answer about the place at the end of a word."""
        before = self.text[: self.text.index(word) + len(word)]
        place = {"line": before.count("\n"), "character": len(before.rpartition("\n")[2])}
        return self.ask(method, textDocument={"uri": self.uri}, position=place)

    def _write(self, message):
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self.server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.server.stdin.flush()

    def _read(self):
        length = 0
        while line := self.server.stdout.readline().strip():
            if line.startswith(b"Content-Length:"):
                length = int(line.split(b":")[1])
        return json.loads(self.server.stdout.read(length))


SCRIPT = """import fnloop as fl

fl.clip(1.0)
fl.ema(
fl.
"""


@pytest.mark.slow
def test_an_editor_shows_the_arguments_of_a_middleware_and_completes_names(tmp_path):
    editor = Editor(tmp_path, SCRIPT)
    try:
        hover = editor.at("textDocument/hover", "fl.cl")["contents"]
        (shown,) = editor.at("textDocument/signatureHelp", "fl.ema(")["signatures"]
        completed = editor.at("textDocument/completion", "ema(\nfl.")["items"]
    finally:
        editor.server.kill()
        editor.server.communicate()
    text = hover["value"] if isinstance(hover, dict) else str(hover)
    for part in ("max_norm: float", "norm_type: float = 2", "-> Middleware", "Scale the gradient"):
        assert part in text
    assert "decay: float" in shown["label"] and "every: int = 1" in shown["label"]
    assert {"accumulate", "clip", "fit", "Step"} <= {one["label"] for one in completed}
