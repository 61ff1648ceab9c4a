"""Let a build of torch for CUDA run on the CPU alone, without the gigabytes of NVIDIA's libraries that it asks for.

The package index has builds for CUDA only, of most versions. Installed by ``pip install --no-deps torch==...``, such a build
is not imported, since the libraries that it links to are missing. This script, run by the same interpreter, puts a library in
the place of each: it has the functions that torch links to, and all of them return 100, "no CUDA-capable device". It also takes
those requirements out of torch's metadata, so that pip does not install them later. It needs gcc, nm and readelf.
"""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

NVIDIA = r"lib(cu|nv|nccl)"
FUNCTIONS = r"_*(cu|nv|nccl|pnccl)"  # of libraries that give their functions no version
SOURCE = "{returns} {name}(void) {{ return {value}; }}"


def output(*command: object) -> str:
    return subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout


def linked(folder: Path) -> tuple[set[str], dict[str, set[str]]]:
    """Return the libraries that those in a folder need and that are not there, and by version the functions that they lack."""
    there, needed, missing, defined = set(), set(), {}, set()
    for library in folder.glob("*.so*"):
        there.add(library.name)
        needed.update(re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "-d", library)))
        for line in output("nm", "-D", library).splitlines():
            kind, symbol = line.split()[-2:]
            name, _, version = symbol.partition("@")
            (missing.setdefault(version, set()) if kind == "U" else defined).add(name)
    missing[""] = {name for name in missing.get("", ()) if re.match(FUNCTIONS, name) and name not in defined}
    return {name for name in needed - there if re.match(NVIDIA, name)}, missing


def build(library: Path, versions: dict[str, set[str]]) -> None:
    """Build a library of functions that do nothing, by version."""
    names = sorted(set().union(*versions.values()))
    lines = [
        SOURCE.format(returns="void *", name=name, value=0)
        if name.startswith("__cudaRegister")  # these are called while the library is loaded
        else SOURCE.format(returns="int", name=name, value=100)
        for name in names
    ]
    exports = [f"{version} {{ global: {'; '.join(sorted(of))}; }};" for version, of in versions.items() if version and of]
    with tempfile.TemporaryDirectory() as folder:
        (source := Path(folder, "source.c")).write_text("\n".join(lines))
        (script := Path(folder, "exports.map")).write_text("\n".join(exports))
        options = [f"-Wl,-soname,{library.name}", *([f"-Wl,--version-script={script}"] if exports else [])]
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
        if name.startswith("libnccl"):  # any one will do for those without a version
            versions[""] = missing[""]
        build(folder / name, versions)
    for metadata in folder.parent.parent.glob("torch-*.dist-info/METADATA"):
        lines = metadata.read_text().splitlines(keepends=True)
        metadata.write_text("".join(x for x in lines if not re.match("Requires-Dist: (nvidia|cuda|triton)", x)))
    print(f"{len(libraries)} libraries of NVIDIA are replaced by ones without a device")


if __name__ == "__main__":
    main()
