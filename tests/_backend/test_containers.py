"""What a container is, how it is put together again, and whether its freed memory is kept."""

import contextlib
import os
import platform
from collections import Counter, OrderedDict, UserDict, defaultdict, deque, namedtuple
from types import MappingProxyType

import pytest
import torch

import fnloop as fl
from fnloop._backend import containers
from fnloop._backend.containers import (
    IN_BATCHES,
    device_in,
    map_leaves,
    pairs_of,
    parts_of,
    tensors_in,
    with_parts,
)
from fnloop.testing import toy, toy_loss


def test_the_device_of_a_nested_value_is_that_of_its_first_tensor():
    assert device_in([1, {"a": torch.ones(1)}]) == torch.device("cpu")
    assert device_in([1, "a"]) is None


class Labeled(list):
    """A list with an attribute, whose constructor does not take its items alone."""

    def __init__(self, label, items):
        super().__init__(items)
        self.label = label


class Named(dict):
    name = "unknown"


Pair = namedtuple("Pair", ["first", "second"])
MAPPINGS = [
    {"a": 1, "b": 2}, Named(a=1, b=2), OrderedDict(b=1, a=2), defaultdict(list, a=1, b=2),
    Counter(a=1, b=2), UserDict(a=1, b=2), MappingProxyType({"a": 1, "b": 2}),
]  # fmt: skip
SEQUENCES = [
    [1, 2], Labeled("years", [1, 2]), (1, 2), Pair(1, 2), torch.Size([1, 2]),
    deque([1, 2], maxlen=3),
]  # fmt: skip
LEAVES = ["text", b"bytes", 1, None, {1, 2}, range(2), torch.ones(2)]
class_of = lambda value: type(value).__name__


@pytest.mark.parametrize("value", [*MAPPINGS, *SEQUENCES], ids=class_of)
def test_a_container_has_its_keys_or_positions_and_with_other_parts_is_of_the_same_kind(value):
    keyed = [*value.items()] if hasattr(value, "items") else [(0, 1), (1, 2)]
    assert list(parts_of(value)) == keyed
    changed = with_parts(value, [10, 20])
    assert type(changed) is type(value)
    assert list(parts_of(changed)) == [(key, 10 * part) for key, part in keyed]
    assert list(parts_of(value)) == keyed
    assert with_parts(changed, [1, 2]) == value


@pytest.mark.parametrize("value", LEAVES, ids=class_of)
def test_anything_else_is_a_leaf(value):
    assert parts_of(value) is None
    assert map_leaves(value) is value


def test_a_copy_keeps_attributes_the_default_and_the_greatest_length():
    named = Named(a=1)
    named.name = "mine"
    assert with_parts(named, [2]).name == "mine"
    assert with_parts(Labeled("years", [1]), [2]).label == "years"
    assert with_parts(defaultdict(list, a=1), [2])["new"] == []
    assert with_parts(deque([1], maxlen=3), [2]).maxlen == 3


def test_every_container_is_put_together_as_it_was():
    nested = {"mappings": [*MAPPINGS], "sequences": (*SEQUENCES,), "leaves": deque(LEAVES)}
    copied = map_leaves(nested)
    assert list(map(type, copied["mappings"])) == list(map(type, MAPPINGS))
    assert copied["mappings"] == MAPPINGS
    assert list(map(type, copied["sequences"])) == list(map(type, SEQUENCES))
    assert copied["sequences"] == nested["sequences"]
    assert all(a is b for a, b in zip(copied["leaves"], LEAVES, strict=True))
    copied["mappings"][0]["a"] = "changed"
    assert nested["mappings"][0]["a"] == 1


def test_a_changed_leaf_is_changed_in_a_copy():
    nested = {"a": (1, [2]), "b": Pair(3, "text")}
    assert map_leaves(nested, lambda leaf: leaf * 2) == {"a": (2, [4]), "b": Pair(6, "texttext")}
    assert nested == {"a": (1, [2]), "b": Pair(3, "text")}
    kept, copied = (1, "text"), ([1],)  # a tuple with the same parts is kept
    assert map_leaves(kept) is kept
    assert map_leaves(copied) == copied and map_leaves(copied)[0] is not copied[0]


def test_a_deque_in_a_batch_is_a_leaf():
    assert parts_of(deque([1]), IN_BATCHES) is None
    one, two, three = torch.tensor(1), torch.tensor(2), torch.tensor(3)
    batch = UserDict(b=[one, Pair(two, "text")], queue=deque([torch.tensor(4)]), a=(three,))
    assert [tensor.item() for tensor in tensors_in(batch)] == [1, 2, 3]


def test_pairs_are_of_two_mappings_or_two_sequences():
    assert pairs_of({"a": 1, "b": 2}, UserDict(c=0, b=3)) == [("b", 2, 3)]
    assert pairs_of((1, 2), deque([3])) == [(0, 1, 3)]
    assert pairs_of([1], {0: 1}) is None
    assert pairs_of("ab", "ab") is None
    assert pairs_of([1], torch.ones(1)) is None


# --- the allocator keeps freed memory during a run, and is set back after it


CPU = torch.device("cpu")
DURING, AFTER = (containers._TRIM_THRESHOLD, 1 << 30), (containers._TRIM_THRESHOLD, 64 << 20)


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    containers._is_set_by_user.cache_clear()
    yield
    containers._is_set_by_user.cache_clear()


@pytest.fixture
def settings(monkeypatch):
    given = []

    def mallopt(name, value):
        given.append((name, value))
        return 1

    monkeypatch.setattr(containers, "_mallopt", lambda: mallopt)
    return given


def new_pages(megabytes):
    """Return how many pages the system gives for tensors of 8 MB that live at the same time."""
    resource = pytest.importorskip("resource", reason="this system does not count pages")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(2 << 20) for _ in range(megabytes // 8)]
    assert tensors[-1][-1] == 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or "LD_PRELOAD" in os.environ,
    reason="the setting is one of glibc",
)
def test_memory_is_used_again():
    containers._mallopt()(containers._MMAP_THRESHOLD, 1 << 17)  # as at the start of a process
    first = new_pages(160)
    with containers.reusing_pages(CPU):
        *_, last = (new_pages(160) for _ in range(5))
    assert last < first / 10


def test_the_setting_lasts_as_long_as_the_outermost_block(settings):
    with containers.reusing_pages(torch.device("cuda")):
        assert settings == []  # nothing is set for a GPU
    with containers.reusing_pages(CPU):
        with containers.reusing_pages(CPU):
            pass
        assert settings[-1] == DURING
    assert settings[-1] == AFTER
    with pytest.raises(ValueError, match="bad"), containers.reusing_pages(CPU):
        raise ValueError("bad")
    assert settings[-1] == AFTER
    with containers.reusing_pages(CPU):
        assert settings[-1] == DURING


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_process_that_is_forked_within_it_gives_its_memory_back(settings):
    with contextlib.ExitStack() as block:
        block.enter_context(containers.reusing_pages(CPU))
        if not (process := os.fork()):
            status = 1
            try:
                assert (settings[-1], containers._users) == (AFTER, 0)
                block.close()  # as a process that continues the run does
                with containers.reusing_pages(CPU):
                    assert settings[-1] == DURING
                status = settings[-1] != AFTER
            finally:
                os._exit(status)
        assert os.waitpid(process, 0)[1] == 0
        assert settings[-1] == DURING
    assert settings[-1] == AFTER


@pytest.mark.parametrize(("name", "value"), [
    ("MALLOC_TRIM_THRESHOLD_", "131072"), ("MALLOC_MMAP_THRESHOLD_", "131072"),
    ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ("GLIBC_TUNABLES", "glibc.malloc.check=0:glibc.malloc.mmap_threshold=131072"),
])  # fmt: skip
def test_the_environment_comes_first(monkeypatch, name, value):
    monkeypatch.setattr(containers, "_mallopt", lambda: pytest.fail)
    monkeypatch.setenv(name, value)
    with containers.reusing_pages(CPU):
        pass


def test_other_settings_of_the_environment_do_not_count(monkeypatch, settings):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.cpu.x86_rep_movsb_threshold=2048")
    with containers.reusing_pages(CPU):
        assert settings[-1] == DURING


@pytest.mark.parametrize("mallopt", [None, lambda name, value: 0], ids=["missing", "refuses"])
def test_a_library_without_the_setting_is_left_as_it_is(monkeypatch, mallopt):
    monkeypatch.setattr(containers, "_mallopt", lambda: mallopt)
    with containers.reusing_pages(CPU):
        assert containers._users == 0


BATCHES = [torch.ones(1)] * 2
CALLS = {
    "fit": lambda step, look: fl.fit(step, toy(), BATCHES, hooks=[look]),
    "run": lambda step, look: [*fl.run(step, toy(), BATCHES, epochs=1, hooks=[look])],
    "evaluate": lambda step, look: fl.evaluate(step, toy(), map(look, BATCHES)),
    "predict": lambda step, look: [*fl.predict(lambda _, batch: look(batch), toy(), BATCHES)],
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_it_is_set_in_runs_and_evaluations(settings, call):
    seen = []

    def look(value):
        seen.append(settings[-1])
        return value

    call(fl.pipeline()(toy_loss), look)
    assert seen == [DURING] * 2
    assert settings[-1] == AFTER
