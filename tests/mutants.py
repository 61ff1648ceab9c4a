"""Change a line of the package at random, and see whether a test notices.

    python tests/mutants.py --number 150 --seed 1
    python tests/mutants.py --number 150 --seed 1 --only 7 12 --kind "not long" --timeout 900

A mutant is a copy of the package in which one line differs: a comparison is flipped, a number or a
flag changed, ``and`` made ``or``, a condition or a returned value negated, an argument dropped, or
a statement removed. Lines are drawn at random from the code outside displays; then what changes in
the line. The fast tests of its room, those of rooms that use it, the laws and the table of wrong
calls run on each mutant, until one fails.

A mutant that survives is a missing test, or a change that no caller can see.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
DISPLAYS = (
    "fnloop/_version.py",
    "fnloop/_display/",
    "fnloop/_extensions/hooks/progress.py",
    "fnloop/_extensions/tools/summary.py",
)
SHOWS = re.compile(r"__repr__|__str__|_repr_\w*|plot|.*html")  # functions that display
TESTS = {  # of what has no folder of tests of its own
    "fnloop/__init__.py": "tests/test_public_api.py",
    "fnloop/testing": "tests/test_laws.py",
}
ALSO = {  # where tests show, after its own, what a room is for
    "fnloop/_core": ["tests/_loop", "tests/_extensions/middleware", "tests/_checkpoint"],
    "fnloop/_data": ["tests/data"],  # what it makes has its name there
    "fnloop/_extensions/graphs": ["tests/_extensions/tools"],
    "fnloop/_loop": ["tests/_hooks"],
    "fnloop/_step": ["tests/_extensions/middleware"],
}
# What only several processes do; their tests are slow, so they run with --kind "not long".
TOGETHER = (
    "fnloop/_backend/",
    "fnloop/_loop/peers.py",
    "fnloop/_extensions/engines/distributed.py",
)
FLIPPED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE,
    ast.GtE: ast.Gt, ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
REMOVED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete, ast.Continue, ast.Break)


def changed(node: ast.AST, **fields: object) -> str:
    """Return the source of a node with other fields."""
    kept = {name: getattr(node, name) for name in node._fields}
    source = ast.unparse(ast.fix_missing_locations(type(node)(**kept | fields)))
    return f"({source})" if isinstance(node, ast.expr) else source


def negated(node: ast.expr) -> str:
    return f"(not ({ast.unparse(node)}))"


def changes(node: ast.AST):
    """Yield each change of a node: the node that is replaced, its new source, and what it is."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPPED:
            yield node, changed(node, ops=[FLIPPED[type(op)]()]), "comparison flipped"
        case ast.BinOp(op=op) if type(op) in FLIPPED:
            yield node, changed(node, op=FLIPPED[type(op)]()), "operator changed"
        case ast.BoolOp():
            yield node, changed(node, op=FLIPPED[type(node.op)]()), "and/or"
        case ast.Constant(value=bool()):
            yield node, repr(not node.value), "flag changed"
        case ast.Constant(value=int() | float()):
            yield node, repr(node.value + 1), "number changed"
        case ast.Call(keywords=[*keywords, last]) if last.arg != "strict":
            yield node, changed(node, keywords=keywords), "argument dropped"
    match node:
        case ast.If() | ast.While() | ast.IfExp():
            yield node.test, negated(node.test), "condition negated"
        case ast.comprehension(ifs=[condition, *_]):
            yield condition, negated(condition), "condition negated"
        case ast.Return(value=ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not())):
            yield node.value, negated(node.value), "returned value negated"
        case ast.Return(value=ast.expr()):
            yield node.value, "None", "None returned"
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield node, "pass", "statement removed"  # without a variable, any line fails
    if isinstance(node, REMOVED):
        yield node, "pass", "statement removed"


def walk(node: ast.AST, inside: bool = False):
    """Yield the nodes of code that runs: no annotation, docstring, text, or what displays."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        if SHOWS.fullmatch(node.name):
            return
        inside, node.returns = True, None
        node.body = node.body[ast.get_docstring(node) is not None :]
    if isinstance(node, ast.JoinedStr | ast.arg | ast.Import | ast.ImportFrom):
        return  # the places in a formatted string are wrong before Python 3.12
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return  # of zip: an assertion
    if isinstance(node, ast.Assign) and ast.unparse(node.targets) == "__tracebackhide__":
        return
    if isinstance(node, ast.AnnAssign):
        node.annotation = ast.Constant("")
    if inside and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
        yield node
    if not isinstance(node, ast.Raise):  # its text is for people
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)


def mutants_of(path: Path) -> dict[int, list]:
    """Return by line what may change in it: from column to column, the new source, what it is."""
    source, found = path.read_bytes().splitlines(), {}
    for node in walk(ast.parse(path.read_text())):
        for old, new, kind in changes(node):
            if old.lineno == old.end_lineno and "\n" not in new:
                place = old.col_offset, old.end_col_offset
                if source[old.lineno - 1][slice(*place)] != new.encode():
                    found.setdefault(old.lineno, []).append((*place, new, kind))
    return found


def drawn(number: int, seed: int) -> list[tuple[str, int, tuple]]:
    """Return mutants: file, line, and the change."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("fnloop/**/*.py"))
    found = {file: mutants_of(ROOT / file) for file in files if not file.startswith(DISPLAYS)}
    lines = [(file, line) for file in found for line in sorted(found[file])]
    rng = random.Random(seed)
    return [(file, line, rng.choice(found[file][line])) for file, line in rng.sample(lines, number)]


def tests_of(file: str) -> list[str]:
    """Return what is tested: first the doctests and the tests of the file, last the two tables."""
    room = "/".join(file.split("/")[:2])
    folder = TESTS.get(room, f"tests/{room.removeprefix('fnloop/')}")
    own = sorted(ROOT.glob(f"{folder}/test_{Path(file).stem.strip('_')}*.py"))
    also = ALSO.get(room, []) + (["tests/processes"] if file.startswith(TOGETHER) else [])
    first = [str(path.relative_to(ROOT)) for path in own]
    return [file, *first, folder, *also, "tests/test_laws.py", "tests/test_wrong_calls.py"]


def tried(mutant: tuple, copies: SimpleQueue, kind: str, timeout: float) -> tuple:
    """Run the tests on a mutant, and return how that ended, and after how many seconds."""
    file, line, (start, end, new, _) = mutant
    copy, begun = copies.get(), time.monotonic()
    path = copy / file
    original = path.read_bytes()
    try:
        lines = original.splitlines(keepends=True)
        lines[line - 1] = lines[line - 1][:start] + new.encode() + lines[line - 1][end:]
        path.write_bytes(b"".join(lines))
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-x"]
        done = subprocess.run(
            [*command, "-m", kind, "--tb=no", *tests_of(file)],
            cwd=copy,
            # What was compiled is kept, though some machines say otherwise: it halves the time.
            env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""},
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        noticed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.M)
        by = noticed[1] if noticed else "the import"
        ended = "survived" if done.returncode == 0 else f"killed by {by}"
    except subprocess.TimeoutExpired:
        ended = f"no failure within {timeout:.0f} s"
    finally:
        path.write_bytes(original)
        copies.put(copy)
    return mutant, ended, time.monotonic() - begun


def copied(folder: Path) -> Path:
    """Copy what git knows of the tree to a folder, and return it."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split("\n"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--number", type=int, default=150, help="of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", help="the numbers of these mutants alone")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that are tried at once")
    parser.add_argument("--kind", default="fast", help="of tests, as in pytest -m")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for each of them")
    args = parser.parse_args()
    mutants = dict(enumerate(drawn(args.number, args.seed)))
    mutants = {i: mutants[i] for i in args.only or mutants}
    counts = {"killed": 0, "survived": 0, "no": 0}
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.jobs) as pool:
        copies = SimpleQueue()
        for i in range(args.jobs):
            copies.put(copied(Path(folder, str(i))))
        results = pool.map(
            lambda mutant: tried(mutant, copies, args.kind, args.timeout), mutants.values()
        )
        for i, (mutant, ended, seconds) in zip(mutants, results, strict=True):
            file, line, (start, end, new, kind) = mutant
            counts[ended.split()[0]] += 1
            text = (ROOT / file).read_bytes().splitlines()[line - 1]
            was, place = text[start:end].decode(), f"{file}:{line}"
            print(f"{i:3} {seconds:5.0f} s  {place}  {kind}: {was} -> {new}  {ended}")
            if not ended.startswith("killed"):
                print(f"{'':12}{text.decode().strip()}", flush=True)
    killed = counts["killed"] / max(1, len(mutants))
    seconds = time.monotonic() - begun
    print(
        f"seed {args.seed}: {counts['killed']} of {len(mutants)} killed ({killed:.0%}), "
        f"{counts['survived']} survived, {counts['no']} took too long; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
