"""Jobs that are killed while they upload, average or pack end as jobs that were not.

For more than these few run tests/benchmarks/faults.py.
"""

import itertools

import killed_jobs
import pytest
import s3
from joined import COUNTS

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not s3.has_packages(), reason="moto and s3fs are not installed"),
]
CASES = killed_jobs.cases(10, seed=0)


def test_the_cases_have_every_row_on_every_number_of_processes():
    cells = {(case.row, case.n) for case in CASES}
    assert cells == {*itertools.product(killed_jobs.ROWS, COUNTS)}
    assert {case.moment for case in CASES} == {*killed_jobs.MOMENTS}
    assert {case.every for case in CASES if case.n > 1} == {True, False}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    with killed_jobs.Jobs.beginning(tmp_path_factory.mktemp("jobs")) as jobs:
        yield jobs


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_job_that_is_killed_ends_as_if_it_had_not_been(case, jobs):
    jobs.check(case)
