"""The public names that need torch are there."""

from importlib import import_module

import pytest

import overlapc

FRONT_DOOR = [name for name, home in overlapc._LATER.items() if home == "overlapc.api"]


@pytest.mark.parametrize("name", FRONT_DOOR)
def test_public_names_of_the_front_door_resolve(name: str) -> None:
    assert callable(getattr(overlapc, name))


def test_the_front_door_promises_just_these() -> None:
    """`capture` and `rewrite` are for who takes the road apart."""
    promised = import_module("overlapc.api").__all__
    assert sorted(promised) == sorted([*FRONT_DOOR, "capture", "rewrite"])
