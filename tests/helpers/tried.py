"""A fit that is tried first, by dry_run and check_script."""

import functools
import itertools

import fnloop as fl
from fnloop.debug import check_script


class Tried(SystemExit):
    """As many runs were tried as were to be; a script ends well."""

    code = 0


def trying(fit, times):
    """Return a function that tries what ``fit`` is to run, and raises after some calls."""
    calls = itertools.count(1)

    @functools.wraps(fit)
    def tried(step, state, loaders, **settings):
        report = fl.dry_run(step, state, loaders, hooks=settings.get("hooks") or ())
        assert report.problems == (), report
        report = check_script(step, state, loaders)
        kinds = {finding.kind for finding in report.findings if finding.problem}
        assert kinds <= {"accumulation", "host read"}, report
        if next(calls) >= times:
            raise Tried
        return fit(step, state, loaders, **settings)

    return tried


def try_digits(give):
    """Give a script its digits, and let its first fit be tried."""
    give()
    fl.fit = trying(fl.fit, 1)
