"""without on several processes: it is refused, there and of a run that was made there."""

import pytest
from joined import said
from process_data import loader
from process_problems import created, entropy

import fnloop as fl
from fnloop.debug import without

pytestmark = pytest.mark.slow

STEP = fl.pipeline()(entropy)


def trained(folder):
    saves = (fl.at_start() | fl.every(steps=2))(fl.checkpoint(folder / "run", keep=None))
    fl.fit(STEP, created(), loader(size=2), steps=4, hooks=(saves,))
    refused = said(lambda: without(folder / "run", STEP, created(), loader(size=2), batch=3))
    return [str(folder / "run"), refused]


def test_two_processes_and_their_runs_are_refused(launched):
    both = launched(trained, 2)
    assert all("without works in one process" in text for _, text in both)
    with pytest.raises(ValueError, match="this run was made on 2, with other batches in each"):
        without(both[0][0], STEP, created(), loader(size=2), batch=3)
