"""Checkpoints with changed contents and valid checksums."""

import json

from fnloop._extensions.checkpoints import files


def craft(path, manifest=None, facts=None):
    """Change the contents of a checkpoint, and write the matching checksums."""
    made = json.loads((path / "manifest.json").read_text())
    del made["check"]
    if facts:
        state = json.loads((path / "state.json").read_text())
        facts(state)
        (path / "state.json").write_text(json.dumps(state))
    file = path / "state.json"
    made["files"]["state.json"] = {
        "bytes": file.stat().st_size,
        "sha256": files.disk.checksum_of_file(file),
    }
    if manifest:
        manifest(made)
    (path / "manifest.json").write_text(
        json.dumps({**made, "check": files.checksum_of_manifest(made)})
    )
    return path
