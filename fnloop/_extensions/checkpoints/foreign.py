"""Tell which library has written a file or folder, so that an error can say so."""

from __future__ import annotations

import contextlib
import zipfile
from pathlib import Path

ADVICE = (
    "Load it into the model before TrainState.create: see the page of the book "
    '"Checkpoints of other libraries"'
)

_OF_LIGHTNING = b"pytorch-lightning_version"  # a key of each of its files, which a pickle shows
_LARGEST_PICKLE = 1 << 26  # bytes of a pickle that are searched; the tensors are not in it


def explain_foreign(path: Path) -> str | None:
    """Return what a path seems to be, and what to do with it; None if that is not known.

    Nothing of a file is unpickled.
    """
    with contextlib.suppress(OSError):
        kind = _kind_of_folder(path) if path.is_dir() else _kind_of_file(path)
        return None if kind is None else f"It seems to be {kind}. {ADVICE}"
    return None


def _kind_of_folder(folder: Path) -> str | None:
    names = {file.name for file in folder.iterdir()}
    ends = {name.partition(".")[2] for name in names}
    if ".metadata" in names and any(name.endswith(".distcp") for name in names):
        return "a checkpoint of torch.distributed.checkpoint"
    if any(name.startswith("random_states_") and name.endswith(".pkl") for name in names):
        return "what accelerate's save_state writes"
    weights = {"model.safetensors", "pytorch_model.bin"} & names
    if ("config.json" in names and weights) or ends & {"safetensors.index.json", "bin.index.json"}:
        return "a folder of weights as Hugging Face writes them"
    if any(name.endswith(".ckpt") for name in names):
        return "a folder of Lightning's checkpoints"
    return None


def _kind_of_file(file: Path) -> str | None:
    with file.open("rb") as opened:
        begins = opened.read(9)
    if begins.startswith(b"PK\x03\x04"):
        if file.suffix == ".ckpt" or _OF_LIGHTNING in _pickle_in(file):
            return "a checkpoint of Lightning"
        return "a file that torch.save has written"
    if begins.startswith(b"\x80") and file.suffix in (".pt", ".pth", ".bin", ".ckpt", ".tar"):
        return "a file that torch.save has written"
    if file.suffix == ".safetensors" and begins.endswith(b"{"):
        return "a file of safetensors"
    return None


def _pickle_in(file: Path) -> bytes:
    """Return the beginning of the pickle in a file of ``torch.save``, or b"" if it has none."""
    with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as opened:
        for name in opened.namelist():
            if name.endswith("data.pkl"):
                with opened.open(name) as pickled:
                    return pickled.read(_LARGEST_PICKLE)
    return b""
