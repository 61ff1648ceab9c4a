"""Kill jobs of 1, 2 and 3 processes in the middle of something, and compare their ends.

    python tests/benchmarks/faults.py --kills 200 --seed 1      # 50 minutes on two busy cores
    python tests/benchmarks/faults.py --only "averaging on 2"

What they are doing, which processes are killed, and when: see tests/helpers/killed_jobs.py.
"""

import argparse
import collections
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))

import killed_jobs


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--only", default="", help="a part of what a case is called")
    args = parser.parse_args()
    table, faults = collections.defaultdict(list), 0
    with tempfile.TemporaryDirectory() as folder, killed_jobs.Jobs.beginning(Path(folder)) as jobs:
        for number, case in enumerate(killed_jobs.cases(args.kills, args.seed)):
            if args.only not in str(case):
                continue
            began = time.monotonic()
            try:
                lived, at = jobs.check(case)
            except (AssertionError, TimeoutError) as error:
                lived, faults = None, faults + 1
                print(f"{number}: {case}: {error}", flush=True)
            else:
                print(f"{number}: {case}: {lived:.1f} s, continued from {at}", flush=True)
            who = "all" if case.every else "one"
            row = f"{case.row}, {case.n} process{'es' * (case.n > 1)}, {who} killed"
            table[row].append((lived, time.monotonic() - began))
    print(f"\n{'':<40} kills  equal  the others end in  seconds")
    for row, every in sorted(table.items()):
        lived, took = zip(*every, strict=True)
        right = [seconds for seconds in lived if seconds is not None]
        longest = f"{max(right):.1f} s" if right else ""
        print(
            f"{row:<40} {len(every):>5}  {len(right):>5}  {longest:>17}  "
            f"{statistics.median(took):>7.1f}"
        )
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
