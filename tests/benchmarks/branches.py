"""Count the branches of a capability elsewhere than at home: what the rest of the package pays.

    python tests/benchmarks/branches.py                  # a line for each capability, and the sum
    python tests/benchmarks/branches.py --show phases    # the lines themselves

A branch is the test of an ``if``, of a conditional expression, of ``while`` or of a filter in a
comprehension, a ``case``, or an operand of ``and`` and ``or``. It is one of a capability if a name
or a string in it matches the words of that capability. A line counts once, whatever it tests. Where
a word is of another subject in a file, a table says so.
"""

import argparse
import ast
import collections
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fnloop"
# The words of each capability, and the modules that are its home: files, or folders with a slash.
CAPABILITIES = {
    "closing records": (
        r'closing|is_left|ends|ended|ends_(?!phase)\w+|\w+_ends?|END|"end"',
        "boundary runs history records",
    ),
    "guards": (
        r"skips?|skipped|(?!can_)\w*_skips?|skip_together|skipped_with|may_skip_in|leaves_out|left_out"
        r"|is_left_out|is_guard|guard\w*|judge",
        "guard guards transaction",
    ),
    "phases": (
        r"phases?|\w*_phase|phase_\w+|PHASE\w*|per_phase|turn_phase|unfinished",
        "plan history",
    ),
    "record_every": (r'record_every|recent|RECENT|\w*_recent|"recent/\w*"', "metrics"),
    "data=": (
        r"data_size|data_rank|backend\.parts|data_mesh|data_group|data_parts|Padding|is_padding"
        r"|_is_padding|can_skip",
        "source",
    ),
    "fully_shard": (
        r"is_sharded|sharded_\w+|DTensor|is_dtensor|local_part|fsdp|FSDPModule",
        "fsdp",
    ),
    "local_sgd": (r"local_sgd|LOCAL_SGD|apart|is_apart|\w+_apart", "local_sgd apart"),
    "averages": (
        r"ema|swa|averaged?|averages|Average|EvaluateAverage|check_not_averaged|evaluation_weights",
        "ema averages",
    ),
    "exact": (r"exact|is_exact|\w+_exact", "exact"),
    "alternate": (r"alternate|AlternateStep|turns?|\w+_turns?", "alternate"),
    "cuda_graph": (
        r"cuda_graph|compiled|compiles|captur(?!able)\w+|graphs?|leaves_graphs_out|CaptureError",
        "compiled graphs/",
    ),
    "tbptt": (r"tbptt|TBPTT|carries|carry|\w+_carry", "accumulate"),
    "raw": (r"raw|RawStep|GradientStep|updates_itself", ""),
}
# Where some of these words are of another subject, such as the ends of parts of a dataset.
OTHER_SUBJECTS = {
    "_backend/host_generators": "raw",
    "_backend/torch_compat": "apart",
    "_core/metrics": "exact _is_exact",
    "_core/state": "capture",
    "_data/map_style": "ends skipped",
    "_data/position": "ended",
    "_data/source": "skips",
    "_extensions/tables": "left_out",
    "_extensions/checkpoints/foreign": "ends",
    "_extensions/checkpoints/optimizer": "raw",
    "_extensions/checkpoints/save": "unfinished",
    "_extensions/engines/distributed": "averages",
    "_extensions/graphs/capture": "guards",
    "_extensions/graphs/operators": "guards",
    "_extensions/hooks/progress": "RECENT",
    "_extensions/middleware/guards": "recent",
    "_extensions/tools/search": "is_left",
    "_extensions/tools/tune": "apart ends left_out",
    "_loop/boundary": "apart",
    "_loop/errors": "phase",
    "_loop/plan": "skipped_phase",
    "_loop/run": "apart ends_apart",
    "_step/transaction": "apart",
    "data/_combine": "ended",
    "debug/_audit": "exact",
    "debug/_verify": "ends left_out",
    "debug/_watch": "left_out",
    "debug/_without": "apart",
}


def tests_in(tree):
    """Yield each condition in a syntax tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp):
            yield from node.values
        elif isinstance(node, ast.match_case):
            yield from filter(None, (node.pattern, node.guard))


def words_in(condition):
    """Yield each name and each string in a condition, with its line."""
    for node in ast.walk(condition):
        match node:
            case ast.Name(id=word):
                yield word, node.lineno
            case ast.Constant(value=str(word)):
                yield from ((word, node.lineno), (f'"{word}"', node.lineno))
            case ast.Attribute(attr=word):
                yield word, node.lineno
                yield ".".join(ast.unparse(node).split(".")[-2:]), node.lineno


def is_home(path, home):
    """Return whether a file is one of the modules of a capability, wherever it lies."""
    return any(
        f"/{name}" in f"/{path}" if name.endswith("/") else path.stem == name
        for name in home.split()
    )


def branches(package=PACKAGE):
    """Return for each capability the lines elsewhere that test it, as (file, line)."""
    found = collections.defaultdict(set)
    for file in sorted(package.rglob("*.py")):
        path = file.relative_to(package)
        others = OTHER_SUBJECTS.get(path.with_suffix("").as_posix(), "").split()
        tests = tests_in(ast.parse(file.read_text()))
        words = [each for test in tests for each in words_in(test) if each[0] not in others]
        for capability, (pattern, home) in CAPABILITIES.items():
            if not is_home(path, home):
                lines = {line for word, line in words if re.fullmatch(pattern, word)}
                found[capability] |= {(str(path), line) for line in lines}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--show", choices=[*CAPABILITIES], help="print the lines of one")
    parser.add_argument("--package", type=Path, default=PACKAGE, help="default: %(default)s")
    args = parser.parse_args()
    found = branches(args.package)
    for path, line in sorted(found[args.show]) if args.show else ():
        text = (args.package / path).read_text().splitlines()[line - 1].strip()
        print(f"{path}:{line}: {text}")
    for capability, places in sorted(found.items(), key=lambda item: -len(item[1])):
        files = len({path for path, _ in places})
        print(f"{capability:<16} {len(places):>4} lines in {files:>2} files")
    print(f"{'all':<16} {len(set().union(*found.values())):>4} lines")


if __name__ == "__main__":
    main()
