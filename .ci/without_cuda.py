"""Let a CUDA build of torch run on the CPU, without the gigabytes of NVIDIA libraries it requires.

For most versions, the package index has only CUDA builds for Linux. After ``pip install --no-deps
torch==...`` such a build cannot be imported, because the libraries that it links to are missing.
This script, run by the same interpreter, builds a stub of each library. A stub has the functions
that torch links to. All of them return 100, "no CUDA-capable device". The script also removes these
requirements from the metadata of torch, so that pip does not install them later.

It needs gcc, nm and readelf.
"""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

NVIDIA = r"lib(cu|nv|nccl)"
FUNCTIONS = r"_*(cu|nv|nccl|pnccl)"  # those without a version
SOURCE = "{returns} {name}(void) {{ return {value}; }}"


def output(*command: object) -> str:
    words = list(map(str, command))
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def linked(folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Return the NVIDIA libraries that a folder lacks, and the functions it lacks, by version."""
    there, needed, missing, defined = set(), set(), {}, set()
    for library in folder.glob("*.so*"):
        there.add(library.name)
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library)))
        for line in output("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            (missing.setdefault(version, set()) if kind == "U" else defined).add(name)
    missing[""] = {name for name in missing.get("", set()) - defined if re.match(FUNCTIONS, name)}
    return {name for name in needed - there if re.match(NVIDIA, name)}, missing


def build(library: Path, versions: dict[str, set[str]]) -> None:
    """Build a stub with these functions, by version."""
    names = sorted(set().union(*versions.values()))
    lines = [
        SOURCE.format(returns="void *", name=name, value=0)
        if name.startswith("__cudaRegister")  # called while torch is loaded
        else SOURCE.format(returns="int", name=name, value=100)
        for name in names
    ]
    versioned = {version: of for version, of in versions.items() if version and of}
    exports = [f"{version} {{ global: {'; '.join(of)}; }};" for version, of in versioned.items()]
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder, "source.c")).write_text("\n".join(lines))
        (script := Path(folder, "exports.map")).write_text("\n".join(exports))
        options = [f"-Wl,--version-script={script}"] if exports else []
        options.append(f"-Wl,-soname,{library.name}")
        output("gcc", "-shared", "-fPIC", "-w", "-o", library, source, *options)


def main() -> None:
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None, "install torch first"
    folder = Path(found.origin).parent / "lib"
    libraries, missing = linked(folder)
    for name in libraries:
        versions = {version: of for version, of in missing.items() if version == name}
        if name.startswith("libnvshmem"):
            versions["NVSHMEM"] = missing.get("NVSHMEM", set())
        if name.startswith("libnccl"):  # functions without a version can be in any stub
            versions[""] = missing[""]
        build(folder / name, versions)
    for metadata in folder.parent.parent.glob("torch-*.dist-info/METADATA"):
        text = metadata.read_text()
        metadata.write_text(re.sub(r"(?m)^Requires-Dist: (nvidia|cuda|triton).*\n", "", text))
    print(f"{len(libraries)} NVIDIA libraries are replaced by stubs")


if __name__ == "__main__":
    main()
