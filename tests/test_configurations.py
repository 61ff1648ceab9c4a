"""Runs from configurations: what Hydra and jsonargparse make of hooks, middleware and moments."""

import copy
import dataclasses
import pickle

import attrs
import jsonargparse
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

import fnloop as fl
from fnloop import schedules
from fnloop.extend import Moment
from fnloop.testing import assert_same, small, toy, toy_loss

LISTS = OmegaConf.create("""
middleware:
- {_target_: fnloop.clip, max_norm: 1.0, only: ["0.*"]}
- _target_: fnloop.schedule
  fn:
    _target_: fnloop.schedules.join
    _args_:
    - {_target_: fnloop.schedules.linear}
    - {_target_: fnloop.schedules.multistep, milestones: [2, 3]}
    at: [2]
hooks:
- {_target_: fnloop.halt_on_nonfinite, steps: 2}
- {_target_: fnloop.early_stop, key: train/loss, patience: 2}
moments:
  valid: {_target_: fnloop.every, steps: 2}
""")
CONVERTED = pytest.mark.parametrize("convert", ["none", "partial", "object", "all"])


@CONVERTED
def test_what_hydra_makes_in_a_list_or_a_mapping_stays_what_it_is(convert):
    middleware, hooks, moments = (
        instantiate(LISTS[name], _convert_=convert) for name in ("middleware", "hooks", "moments")
    )
    at = schedules.join(schedules.linear(), schedules.multistep(milestones=[2, 3]), at=[2])
    assert list(middleware) == [fl.clip(max_norm=1.0, only=["0.*"]), fl.schedule(fn=at)]
    assert list(hooks) == [fl.halt_on_nonfinite(2), fl.early_stop("train/loss", 2)]
    assert dict(moments) == {"valid": fl.every(steps=2)}


@CONVERTED
def test_a_run_from_a_configuration_is_the_run_by_hand(convert):
    problem, made = small(), instantiate(LISTS, _convert_=convert)
    loaders = {"train": problem.batches, "valid": problem.batches[:1]}
    settings = {"hooks": made["hooks"], "evaluate_every": made["moments"]}
    found = fl.fit(
        fl.pipeline(*made["middleware"])(problem.loss_fn),
        problem.state(),
        loaders,
        epochs=2,
        **settings,
    )
    rates = schedules.join(schedules.linear(), schedules.multistep([2, 3]), at=[2])
    step = fl.pipeline(fl.clip(1.0, only=["0.*"]), fl.schedule(rates))(problem.loss_fn)
    hooks = (fl.halt_on_nonfinite(2), fl.early_stop("train/loss", 2))
    by_hand = fl.fit(
        step, problem.state(), loaders, epochs=2, hooks=hooks, evaluate_every=fl.every(steps=2)
    )
    assert_same(found, by_hand, rtol=0)
    assert found.history["valid/loss"] == by_hand.history["valid/loss"]


def test_what_was_made_of_a_configuration_holds_none_of_it():
    rates = schedules.multistep(OmegaConf.create([2, 3]))
    made = fl.clip(1.0, only=OmegaConf.create(["0.*"]))
    assert type(made.call.kwargs["only"]) is list and type(rates.call.args[0]) is list
    assert b"omegaconf" not in pickle.dumps([made, rates])


@attrs.frozen
class Counting(fl.Hook):
    calls: list = attrs.field(factory=list)

    def __call__(self, state):
        self.calls.append(state.step)
        return state


@attrs.frozen
class at_step(Moment):
    n: int = 2

    def due(self, state):
        return state.step == self.n


def test_so_do_hooks_and_moments_of_a_user_that_attrs_has_made():
    hook, moment = Counting(), at_step(3)
    held = OmegaConf.create([hook, moment], flags={"allow_objects": True})
    assert held[0] is hook and held[1] is moment
    assert attrs.evolve(moment, n=4) == at_step(4)


def test_only_the_instances_hide_their_fields():
    hook = fl.early_stop("train/loss", 2)
    assert not attrs.has(hook) and attrs.has(fl.early_stop)
    assert attrs.evolve(hook, patience=3) == fl.early_stop("train/loss", 3)
    for value in (hook, fl.every(seconds=2), fl.clip(1.0), schedules.cosine(2), fl.at_end()):
        for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
            assert same == value


# --- what is not the library's


@dataclasses.dataclass
class Shouting:
    text: str = "hey"

    def __call__(self, state):
        return state


@dataclasses.dataclass
class Always:
    text: str = "now"

    def due(self, state):
        return True


BOTH = OmegaConf.create([{"_target_": f"{__name__}.{name}"} for name in ("Shouting", "Always")])
PLACES = {
    "a hook is": lambda made: {"hooks": made[:1]},
    "evaluate_every": lambda made: {"evaluate_every": made[1]},
    "record_every": lambda made: {"record_every": made[1]},
}


@pytest.mark.parametrize("place", PLACES)
def test_a_record_of_a_user_in_a_list_is_explained_and_the_advice_is_right(place):
    def run(**given):
        return fl.fit(fl.pipeline()(toy_loss), toy(), [torch.ones(1)], **{"hooks": ()} | given)

    with pytest.raises(TypeError, match=place) as caught:
        run(**PLACES[place](instantiate(BOTH)))
    assert "got the DictConfig that Hydra makes of a" in str(caught.value)
    assert 'write instantiate(config, _convert_="all")' in str(caught.value)
    assert run(**PLACES[place](instantiate(BOTH, _convert_="all"))).step == 1


def test_it_is_explained_in_a_pipeline_too():
    with pytest.raises(TypeError, match="the DictConfig that Hydra makes of a Shouting"):
        fl.pipeline(*instantiate(BOTH))


# --- jsonargparse


def parsed(function, *words, **settings):
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(function, **settings)
    return parser.instantiate(parser.parse_args(list(words))).as_dict()


def test_a_command_line_has_the_arguments_of_fit():
    made_by_hand = {"step", "state", "loaders"}
    assert parsed(fl.fit, skip=made_by_hand)["evaluate_every"] == fl.every(epochs=1)
    words = ["--hooks+=fnloop.early_stop", "--hooks.key=valid/loss", "--hooks.patience=3"]
    words += ["--evaluate_every=fnloop.every", "--evaluate_every.steps=100", "--epochs=2"]
    given = parsed(fl.fit, *words, skip=made_by_hand)
    assert given["hooks"] == [fl.early_stop("valid/loss", 3)] and given["epochs"] == 2
    assert given["evaluate_every"] == fl.every(steps=100)


def train(
    middleware: list[fl.Middleware],
    hooks: list[fl.Hook],
    every: Moment = fl.every(epochs=1) | fl.at_end(),  # noqa: B008
):
    """Train."""


def test_a_function_of_a_user_may_take_hooks_middleware_and_moments():
    clip = '--middleware=[{"class_path": "fnloop.clip", "init_args": {"max_norm": 2.0}}]'
    given = parsed(train, clip, "--hooks+=fnloop.halt_on_nonfinite")
    assert given["middleware"][0].call.kwargs["max_norm"] == 2.0
    assert given["hooks"] == [fl.halt_on_nonfinite()]
    assert given["every"] == fl.every(epochs=1) | fl.at_end()
