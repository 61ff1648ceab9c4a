"""Checkpoints in S3, over a link that fails: runs that are killed while they upload, and others.

The server is moto's, in a process of its own. All requests pass through a link in this process.
"""

import collections
import json
import os
import re
import shutil
import subprocess
import sys
import time

import killed_run
import pytest
import s3
from killed_run import UPDATES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not s3.has_packages(), reason="moto and s3fs are not installed"),
]


@pytest.fixture(scope="module")
def link():
    with s3.s3_server() as port, s3.Link.to(port) as link:
        yield link


@pytest.fixture(autouse=True)
def nothing_was_decided_before(link):
    link.reset()


@pytest.fixture(scope="module")
def train(link, tmp_path_factory):
    """A function that trains in a child process, and returns how that ended."""
    folder = tmp_path_factory.mktemp("helper")
    errors, cache = folder / "errors", folder / "cache"
    variables = {**os.environ, **s3.environment(link.port), "FNLOOP_CACHE": str(cache)}
    variables |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": variables}
    with subprocess.Popen([sys.executable, killed_run.__file__], text=True, **pipes) as helper:

        def train(run, **settings):
            run.mkdir(exist_ok=True)
            settings = {"run": str(run), "address": f"s3://{s3.BUCKET}/{run.name}", **settings}
            request = {"what": "train", "arguments": settings, "signal": {}, "errors": str(errors)}
            helper.stdin.write(json.dumps(request) + "\n")
            helper.stdin.flush()
            answer = json.loads(helper.stdout.readline())
            return answer["status"], errors.read_text()

        train.cache = cache
        yield train


@pytest.fixture(scope="module")
def whole(train, tmp_path_factory):
    """The result of a run that nothing disturbs."""
    run = tmp_path_factory.mktemp("whole")
    assert train(run) == (0, "")
    return result_of(run)


def result_of(run):
    return json.loads((run / "result.json").read_text())


def steps_in(run):
    """The steps from which attempts of a run began."""
    return [int(step) for step in re.findall(r"start (\d+)", (run / "log").read_text())]


def checkpoints(link, run):
    """Ask the server, past the link, which checkpoints are whole."""
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{link.target}", **KEYS)
    found = client.list_objects_v2(Bucket=s3.BUCKET, Prefix=f"{run.name}/")
    keys = {item["Key"].removeprefix(f"{run.name}/") for item in found.get("Contents", ())}
    manifests = {key.partition("/")[0] for key in keys if key.endswith("/manifest.json")}
    rest = {key for key in keys if key.partition("/")[0] not in manifests}
    return sorted(manifests), rest - {".checkpoints.json"}


KEYS = {
    "aws_access_key_id": "testing", "aws_secret_access_key": "testing", "region_name": "us-east-1",
}  # fmt: skip
LONG = pytest.mark.long


def at_request(number, method, ending, decided):
    """Return what decides so on the n-th request of a method for a key with some ending."""
    left = iter(range(number - 1))

    def decide(method_, key):
        fits = method_ == method and key.endswith(ending)
        return decided if fits and next(left, None) is None else None

    return decide


# --- kills: the number of the request, its method, the end of its key, and when in it
KILLS = {
    "the claim": (1, "PUT", ".checkpoints.json", "half"),
    "the first file": (1, "PUT", "model.safetensors", "half"),
    "a large file": (3, "PUT", "optimizer.safetensors", "half"),
    "a small file": (3, "PUT", "state.json", "half"),
    "the list of names": (4, "PUT", ".checkpoints.json", "half"),
    "after the list of names": (4, "PUT", ".checkpoints.json", "after"),
    "the manifest": (3, "PUT", "manifest.json", "half"),
    "after the manifest": (3, "PUT", "manifest.json", "after"),
    "a removed manifest": (1, "DELETE", "manifest.json", "half"),
    "after a removed manifest": (1, "DELETE", "manifest.json", "after"),
    "a removed file": (1, "DELETE", "model.safetensors", "after"),
}
WAYS = [(here, {"background": True} if back else {}) for here in (0, 1) for back in (1, 0)]
ROWS = [  # each in one way: continued on this machine or elsewhere, uploaded beside training or not
    pytest.param(name, *WAYS[i % 4], id=name) for i, name in enumerate(KILLS)
]


@LONG
@pytest.mark.parametrize(("when", "here", "settings"), ROWS)
def test_a_run_killed_while_it_uploads_ends_as_if_it_had_not_been(
    when, here, settings, train, whole, link, tmp_path
):
    run, killed = tmp_path / f"killed-{abs(hash((when, here, *settings)))}", []
    *request, moment = KILLS[when]
    link.decide = at_request(*request, moment)
    link.cut = lambda: (killed.append(when), s3.kill(run))
    status, errors = train(run, **settings)
    assert (status, killed[:1]) == (-9, [when]), errors
    link.reset()
    if not here:
        shutil.rmtree(train.cache)
    there, _ = checkpoints(link, run)
    assert train(run, **settings) == (0, "")
    assert result_of(run) == whole
    begun, newest = steps_in(run)[1], int(there[-1][5:]) if there else 0
    assert begun >= newest if here else begun == newest
    kept, rest = checkpoints(link, run)
    assert kept[-1] == f"step-{UPDATES:08d}" and (len(kept), rest) == (3, set())


@LONG
def test_a_run_killed_many_times_ends_as_if_it_had_not_been(train, whole, link, tmp_path):
    """At every seventh change of what is there, on one machine or the next."""
    run, starts = tmp_path / "often", 0
    while True:
        left = iter(range(7 + starts % 3))
        change = lambda method: method in ("PUT", "DELETE") and next(left, None) is None
        link.decide = lambda method, key: "half" if change(method) else None
        link.cut = lambda: s3.kill(run)
        status, errors = train(run, background=bool(starts % 2))
        link.reset()
        starts += 1
        if status == 0:
            break
        assert status == -9 and starts < 40, errors
        if starts % 3 == 0:
            shutil.rmtree(train.cache)
    assert starts > 5 and result_of(run) == whole


# --- faults


@LONG
@pytest.mark.parametrize("settings", [{}, {"background": True}], ids=["", "background"])
def test_answers_of_5xx_that_pass_are_not_noticed(settings, train, whole, link, tmp_path):
    """Whatever repeats a request draws no pause from the generators of the run."""
    seen = collections.Counter()

    def decide(*request):
        seen[request] += 1
        fails = "step-00000010" in request[1] and seen[request] <= 2
        return (503, 500)[seen[request] - 1] if fails else None

    link.decide = decide
    run = tmp_path / f"refused-{len(settings)}"
    assert train(run, **settings) == (0, "")
    assert result_of(run) == whole
    assert [n for (_, key), n in seen.items() if "step-00000010" in key and n > 2]


@pytest.mark.long
def test_a_fault_that_lasts_ends_the_run_and_loses_nothing(train, whole, link, tmp_path):
    run = tmp_path / "denied"
    denied = lambda method, key: 403 if "step-00000015" in key and method == "PUT" else None
    link.decide = denied
    status, errors = train(run, background=True)
    assert status == 1
    said = r"PermissionError: step-00000015 could not be uploaded .*whole in (\S+)\. The next"
    assert (found := re.search(said, errors)), errors
    assert (manifest := os.path.join(found[1], "manifest.json")) and os.path.exists(manifest)
    link.reset()
    assert train(run, background=True) == (0, "")
    assert result_of(run) == whole and steps_in(run)[1] >= 15


@LONG
def test_a_slow_link_does_not_change_a_run(train, whole, link, tmp_path):
    link.rate = 400_000
    begun = time.monotonic()
    assert train(tmp_path / "slow", background=True) == (0, "")
    print(f"{time.monotonic() - begun:.1f} s")
    assert result_of(tmp_path / "slow") == whole


@LONG
def test_lists_that_lag_are_not_relied_on(train, whole, link, tmp_path):
    run = tmp_path / "lagging"
    link.lags = True
    link.decide = at_request(4, "PUT", "manifest.json", "after")
    link.cut = lambda: s3.kill(run)
    assert train(run)[0] == -9
    shutil.rmtree(train.cache)
    link.decide = lambda method, key: None
    assert train(run) == (0, "")
    assert result_of(run) == whole and steps_in(run) == [0, 20]


def test_a_resume_downloads_each_byte_once(train, whole, link, tmp_path):
    run = tmp_path / "once"
    assert train(run)[0] == 0
    shutil.rmtree(train.cache)
    link.received.clear()
    assert train(run)[0] == 0  # it resumes twice
    newest = {k: n for k, n in link.received.items() if "step-" in k and "manifest" not in k}
    head = f"{run.name}/step-{UPDATES:08d}/"
    assert {key.removeprefix(head) for key in newest} == {
        "model.safetensors", "optimizer.safetensors", "slots.safetensors", "state.json"
    }  # fmt: skip
    manifest = json.loads(_read(link, f"{head}manifest.json"))
    assert {k.removeprefix(head): n for k, n in newest.items()} == {
        name: facts["bytes"] for name, facts in manifest["files"].items()
    }


def _read(link, key):
    import boto3

    client = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{link.target}", **KEYS)
    return client.get_object(Bucket=s3.BUCKET, Key=key)["Body"].read()


@LONG
def test_a_bucket_that_is_missing_is_an_error_before_the_first_update(train, link, tmp_path):
    status, errors = train(tmp_path / "missing", address="s3://no-such-bucket/run")
    assert status == 1
    assert re.search(r"FileNotFoundError: s3://no-such-bucket/run: .*bucket does not exist", errors)
    assert "update" not in (tmp_path / "missing" / "log").read_text()


@LONG
def test_access_that_is_denied_is_an_error_before_the_first_update(train, link, tmp_path):
    link.decide = lambda method, key: 403 if method == "PUT" else None
    status, errors = train(tmp_path / "denied-at-once")
    assert status == 1 and "PermissionError: s3://bucket/denied-at-once" in errors
    assert "update" not in (tmp_path / "denied-at-once" / "log").read_text()
