"""One walk finds a module's parts as PyTorch's walks do; a state tells what `repr` tells."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from torch import nn, ones

from overlapc.state.described import state_of, tensors_of
from overlapc.state.module_state import members_of


@given(st.data())
def test_members_are_those_of_pytorchs_walks(data: st.DataObject) -> None:
    """Of modules that share children, parameters and buffers, miss some, and contain each other."""
    modules = [nn.Module() for _ in range(data.draw(st.integers(1, 5)))]
    parameters = [nn.Parameter(ones(1)) for _ in range(3)]
    buffers = [ones(1) for _ in range(2)]
    for each in modules:
        for name, kinds in (("m", modules), ("p", parameters), ("b", buffers)):
            for i, part in enumerate(
                data.draw(st.lists(st.sampled_from([*kinds, None]), max_size=3))
            ):
                if name == "m":
                    each.add_module(f"m{i}", part)
                elif name == "p":
                    each.register_parameter(f"p{i}", part)
                else:
                    each.register_buffer(f"b{i}", part)
    root, found = modules[0], members_of(modules[0])
    assert [*zip(found.paths, found.modules, strict=True)] == [*root.named_modules()]
    assert [*map(id, found.parameters)] == [*map(id, root.parameters())]
    assert [*map(id, found.buffers)] == [*map(id, root.buffers())]


def test_states_tell_values_that_compare_equal_apart() -> None:
    module = nn.Module()

    def state(value: object) -> object:
        module.value = value
        members = members_of(module)
        return state_of(members, tensors_of(members))[0]

    assert state(1) == state(1)
    assert hash(state(1)) == hash(state(1))
    assert len({state(value) for value in (1, True, 1.0, "1", 0.0, -0.0, None)}) == 7
