"""`Traced` turns a Python function into joint graphs, through Dynamo.

Dynamo traces the function as one graph. At every call it checks what the trace depends on, traces
again where that has changed, and repeats the function's Python side effects. AOTAutograd makes the
joint graph. Its runtime handles mutated inputs, aliases and tensor subclasses around the code that
runs in the graph's place.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor, fx, nn
from torch._dynamo import config as dynamo_config
from torch._dynamo.exc import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
)
from torch._functorch._aot_autograd import descriptors
from torch._inductor import config as inductor_config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.core.errors import CaptureError, OptionError, OverlapcError
from overlapc.nn.layers import as_here, slices_now
from overlapc.passes.capture.aot import (
    as_boxed,
    export,
    lasting,
    metas_of,
    views_of,
    without_backward,
)
from overlapc.passes.capture.detach import detach_kept, with_history
from overlapc.passes.capture.guarding import changed_objects, guarding, hands_on
from overlapc.passes.capture.in_dynamo import collectives_in_graphs
from overlapc.passes.capture.marks import calls_of, marks_of
from overlapc.passes.capture.stubs import Weakly, never, stubs
from overlapc.passes.capture.untraced import SwitchedOff, refuse_switched_off, untraced
from overlapc.passes.capture.watched import watched
from overlapc.passes.exact.as_eager import CAPTURE, as_eager, undivided
from overlapc.passes.exact.differences import asked, differences
from overlapc.passes.means import weigh_means
from overlapc.passes.nodes import primal_nodes
from overlapc.passes.opaque.stand_in import Opaques
from overlapc.passes.sharded import as_fsdp2
from overlapc.passes.trace import Captured, changed_inputs, trace_joint

RECOMPILES = 64  # after so many graphs a function is assumed to change at every call
NO_GRADIENT = (
    "nothing that the model returns requires a gradient; expected a loss of parameters or inputs "
    "of which at least one requires one"
)
Run = Callable[[dict[str, Any]], Sequence[Any]]
# Dynamo's settings that leave nothing unguarded: by default it assumes that hooks never change.
GUARDS = {
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_no_tensor_aliasing_guards_on_parameters": False,
    "use_numpy_random_stream": True,  # numpy's random numbers, not torch's in their place
}
_numbers = itertools.count()


@dataclass(frozen=True)
class Owner:
    """A tensor that gets a gradient. If the gradient is a tensor subclass, a graph returns its
    parts, and `whole` puts them together. If it is `watched`, autograd hands the gradient over."""

    tensor: Tensor
    whole: Callable[[Tensor], Tensor] | None = None
    watched: bool = False


@dataclass(frozen=True)
class Leaf:
    """Says which argument of Dynamo's graph gets a gradient. For tensor subclasses it also has
    `meta` and the names of the inputs that are the other parts."""

    place: int
    meta: Any = None
    parts: tuple[str, ...] = ()

    def owner(self, flat: Sequence[Any], state: dict[str, Any], kept: Collection[int]) -> Owner:
        tensor = flat[self.place]
        if self.meta is None:
            return Owner(tensor, watched=id(tensor) in kept)
        meta, parts = self.meta, [state.get(name) for name in self.parts]
        before = [None] * meta.flat_tensor_start_idx  # other gradients, which it does not read

        def whole(gradient: Tensor) -> Tensor:
            inner = [gradient if part is None else part for part in parts]
            made: Tensor = meta.creation_fn([*before, *inner], is_runtime=True)
            return made

        return Owner(tensor, whole, id(tensor) in kept)


@dataclass
class Joint:
    """A joint graph with the names of the nodes that are its inputs and results."""

    captured: Captured
    inputs: tuple[str, ...]
    places: tuple[int, ...]  # by input: which argument of Dynamo's graph
    leaves: dict[str, Leaf]  # input -> what gets its gradient
    tangents: dict[str, Any]  # name -> descriptor
    results: dict[str, Any]  # `result0` -> descriptor
    marks: tuple[int | None, ...]  # by result of Dynamo's graph: the number from `mark`
    views: tuple[bool, ...] = ()  # by result of Dynamo's graph: a view of another or of an input?
    arguments: Sequence[Any] = ()  # of Dynamo's graph; set only during `adopt`
    hands_on: bool = False  # does what a call does depend on the calls before it?
    calls: frozenset[int] = frozenset()  # numbers from `called`
    weighs: bool = False  # are means weighed with the slice's share of the batch's targets?
    # gradients and autocast as in the call that was traced
    as_called: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext

    def state(
        self, flat: Sequence[Any], inner: Sequence[Any], kept: Collection[int]
    ) -> dict[str, Any]:
        """Return the values that the parts of the graph read, from the arguments of one call.
        `kept` are the ids of those that are watched."""
        state = dict(zip(self.inputs, inner, strict=True))
        leaves = self.leaves.items()
        return state | {owner_of(name): leaf.owner(flat, state, kept) for name, leaf in leaves}

    def changed(self) -> list[Tensor]:
        """The arguments that the model writes to, during `adopt`."""
        names = changed_inputs(self.captured.joint)
        pairs = zip(self.inputs, self.places, strict=True)
        return [self.arguments[place] for name, place in pairs if name in names]


def owner_of(name: str) -> str:
    """Return the name under which a state holds the owner of an input's gradient."""
    return f"owner_of_{name}"


@contextlib.contextmanager
def tracing(lines: list[str]) -> Iterator[None]:
    """Within this context Dynamo traces whole functions and their collectives, and guards all that
    it reads. Lines that may differ from eager are added to `lines`."""
    with collectives_in_graphs, undivided, guarding(), asked(lines):
        yield


class Stop(Exception):
    """`adopt`, or the code that runs in a graph's place, raises this to end the call."""


class Traced:
    """A function whose graphs are replaced: for each, `adopt` returns the code to run. `ran` tells
    whether the last call ran a graph.

    A function that cannot be one graph raises a CaptureError with reason and place, before anything
    has run. It is traced with gradients, or, if it may be a forward `alone`, as it is called: a
    graph without gradients is then one without a backward. If its backward is `ours`, and no later
    autograd's, what it keeps beside its marked results is detached. `check` may refuse a graph of
    Dynamo's and its arguments.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        adopt: Callable[[Joint], Run],
        model: Any = None,
        *,
        alone: bool = False,
        ours: bool = False,
        check: Callable[[fx.GraphModule, Sequence[Any]], None] = lambda graph, arguments: None,
    ) -> None:
        self._adopt, self._alone, self._ours, self._check = adopt, alone, ours, check
        self.opaques = Opaques(model if isinstance(model, nn.Module) else nn.Module())
        backend = Weakly(WeakMethod(self._begin))
        self._compiled = torch.compile(_of_its_own(function), backend=backend, fullgraph=True)
        self.ran = False
        self._here = as_here()  # of the last call
        self.differences: list[str] = []  # lines whose trace may differ from eager

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.opaques.traced(lambda: self._called(*args, **kwargs))

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        self.ran, self._here = False, as_here()
        refuse_switched_off()
        settings = dynamo_config.patch(**_settings())
        with_gradients = torch.is_grad_enabled() or not self._alone
        with torch.set_grad_enabled(with_gradients), settings, tracing(self.differences):
            try:
                return self._compiled(*args, **kwargs)
            except BackendCompilerFailed as error:
                inner = error.inner_exception
                if isinstance(inner, (OverlapcError, Stop)):
                    raise inner from None
                said = (str(inner).strip() or "unknown").splitlines()[0]
                raise CaptureError(f"{type(inner).__name__}: {said}") from error
            except FailOnRecompileLimitHit as error:
                raise CaptureError(f"it has become another graph {RECOMPILES} times") from error
            except (TorchDynamoException, GuardOnDataDependentSymNode) as error:
                raise untraced(error) from error
            except (OverlapcError, Stop):
                raise
            except Exception as error:
                if self.ran:
                    raise
                raise untraced(error) from error

    def _adopted(self, joint: Joint) -> Run:
        self.opaques.refuse_changes(joint.changed(), changed_objects())
        return self._adopt(joint)

    def _begin(self, graph: fx.GraphModule, arguments: Sequence[Any]) -> Callable[..., Any]:
        """The backend of `torch.compile`."""
        run: Run | None = None
        joint: Joint
        flat: Sequence[Any] = ()
        kept: Collection[int] = ()

        def partition(
            traced: fx.GraphModule,
            _inputs: Any,
            *,
            num_fwd_outputs: int,
            static_lifetime_input_indices: Sequence[int] | None = None,
            **_: Any,
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            return stubs(adopt(traced, num_fwd_outputs, static_lifetime_input_indices or ()))

        def adopt(traced: fx.GraphModule, results: int, static: Sequence[int]) -> Captured:
            nonlocal run, joint
            as_fsdp2(traced, results)
            captured = trace_joint(traced, results, inner_places(traced, static))
            joint = _described(captured, marks_of(graph), views_of(exported), metas_of(exported))
            joint.hands_on, joint.weighs, joint.as_called = has_order, weighs, self._here
            joint.arguments, joint.calls = arguments, calls_of(graph)
            run, joint.arguments = self._adopted(joint), ()
            return captured

        def runs(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
            if run is None:
                if not self._alone:
                    raise OptionError(NO_GRADIENT)
                adopt(*without_backward(module), lasting(arguments))
            return as_boxed(boxed)

        def boxed(inner: list[Any]) -> list[Any]:
            assert run is not None
            self.ran, state = True, joint.state(flat, inner, kept)
            inner.clear()
            with torch.no_grad(), torch._C._DisableAutocast():  # casts are in the graph
                return list(run(state))

        refuse_subclasses(arguments)
        self._check(graph, arguments)
        self.differences += differences(graph)
        unreturned = detach_kept(graph, marks_of(graph)) if self._ours else ()
        has_order, weighs = hands_on(), weigh_means(graph, slices_now(), self.differences)
        drawn = inductor_config.patch(fallback_random=True)
        with drawn, as_eager(arguments), contextlib.ExitStack() as stack:
            exported = export(stack, graph, arguments)
            call = torch._functorch.aot_autograd.aot_compile_joint_with_descriptors(
                exported, partition_fn=partition, fw_compiler=runs, bw_compiler=never
            )

        def called(*given: Any) -> Any:
            nonlocal flat, kept
            flat, kept = given, watched(given)  # before the call, which keeps all of them
            try:
                return with_history(call(*given), unreturned)
            finally:
                flat = ()

        return called


def _settings() -> dict[str, Any]:
    """Dynamo's settings: it guards all that it can, and raises errors instead of skipping."""
    return {
        **CAPTURE,
        **GUARDS,
        # a changing counter must not cause a trace at every call
        "allow_unspec_int_on_nn_module": True,
        "recompile_limit": RECOMPILES,
        "accumulated_recompile_limit": RECOMPILES,
        # Libraries (transformers) log these once; other log messages are no part of a graph.
        "ignore_logging_functions": dynamo_config.ignore_logging_functions | _said_once(),
    }


def _said_once() -> set[Any]:
    warning = getattr(logging.Logger, "warning_once", None)
    return set() if warning is None else {warning}


def _of_its_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy of the function with its own code object: Dynamo keeps graphs, and values that it saw
    change, by code object and name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # or it would run, and then run again
            raise SwitchedOff("torch.compile does not trace it")
        return function(*args, **kwargs)

    code = call.__code__.replace(co_name=f"call{next(_numbers)}")
    return types.FunctionType(code, call.__globals__, code.co_name, None, call.__closure__)


# --------------------------------------------------------------------------- descriptors


def inner_places(joint: fx.GraphModule, static: Sequence[int]) -> tuple[int, ...]:
    """Return which inputs of the joint graph belong to these arguments of Dynamo's graph: a tensor
    subclass has several inputs."""
    known = set(static)
    inner = []
    for i, node in enumerate(primal_nodes(joint)):
        place = _place(node.meta.get("desc"))
        if (i if place is None else place) in known and isinstance(node.meta.get("val"), Tensor):
            inner.append(i)
    return tuple(inner)


def outer(desc: Any) -> Any:
    """Return the descriptor of the tensor subclass that the described tensor is a part of."""
    return outer(desc.base) if type(desc).__name__.startswith("SubclassGetAttr") else desc


def _place(desc: Any) -> int | None:
    whole = outer(desc)
    return whole.idx if isinstance(whole, descriptors.PlainAOTInput) else None


def _described(
    captured: Captured,
    marks: tuple[int | None, ...],
    views: tuple[bool, ...],
    metas: Sequence[Any],
) -> Joint:
    joint = captured.joint
    inputs = primal_nodes(joint)
    places = []
    for node in inputs:
        place = _place(node.meta["desc"])
        if place is None and type(node.meta["desc"]).__name__ == "ForwardTokenAOTInput":
            raise CaptureError(
                "the model calls an op with ordered side effects (as torch.linalg.inv's check for "
                "errors); expected an op without any (torch.linalg.inv_ex)"
            )
        if place is None:
            raise CaptureError(
                f"the model takes {node.meta['desc']}, expected tensors that share no memory with "
                "one another where they are changed"
            )
        places.append(place)
    output = joint.graph.find_nodes(op="output")[0]
    count = captured.num_fwd_outputs
    descs = output.meta["desc"]
    gradients = list(output.args[0][count:])
    if len(gradients) != len(inputs):
        raise CaptureError("gradients are of other tensor subclasses than their tensors")
    tangents = {
        node.name: node.meta["desc"]
        for node in joint.graph.find_nodes(op="placeholder")
        if captured.trace.kinds[node.name] == "gradient"
    }
    return Joint(
        captured,
        tuple(node.name for node in inputs),
        tuple(places),
        _leaves(inputs, gradients, places, metas),
        tangents,
        {f"result{i}": descs[i] for i in range(count)},
        marks,
        views,
    )


def _leaves(
    inputs: Sequence[fx.Node], gradients: Sequence[Any], places: Sequence[int], metas: Sequence[Any]
) -> dict[str, Leaf]:
    leaves = {}
    for place in dict.fromkeys(places):
        mine = [i for i, other in enumerate(places) if other == place]
        made = [i for i in mine if is_gradient(gradients[i])]
        if not made:
            continue
        meta = metas[place] if place < len(metas) else None
        meta = meta if hasattr(meta, "creation_fn") else None
        parts = [getattr(gradients[i], "name", "") for i in mine]
        known = {node.name for node in inputs}
        others = [part for i, part in zip(mine, parts, strict=True) if i != made[0]]
        if len(made) > 1 or not known.issuperset(others):
            raise CaptureError(
                f"{inputs[made[0]].name} is a tensor subclass of several tensors, expected one"
            )
        names = tuple("" if i == made[0] else part for i, part in zip(mine, parts, strict=True))
        leaves[inputs[made[0]].name] = Leaf(place, meta, names if meta is not None else ())
    return leaves


def refuse_subclasses(arguments: Sequence[Any]) -> None:
    """Raise for tensor subclasses that AOTAutograd cannot take: those that do not name their inner
    tensors."""
    for value in arguments:
        kind = type(value)
        if (
            isinstance(value, Tensor)
            and not isinstance(value, FakeTensor)
            and kind is not Tensor
            and kind.__torch_function__ is not torch._C._disabled_torch_function_impl
            and not is_traceable_wrapper_subclass(value)
        ):
            raise CaptureError(
                f"it takes a {kind.__module__}.{kind.__qualname__}, a subclass of Tensor that "
                "torch.compile cannot take apart; expected plain tensors: give it "
                "`x.as_subclass(torch.Tensor)`"
            )


def is_gradient(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), Tensor)


def capture(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Joint:
    """Return the joint graph of a call, without running it."""
    return _captured(function, args, kwargs, alone=False)


def capture_as_called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Joint:
    """The same, but without gradients, or where nothing requires one, of the forward alone."""
    return _captured(function, args, kwargs, alone=True)


def _captured(function: Callable[..., Any], args: Any, kwargs: Any, alone: bool) -> Joint:
    joints: list[Joint] = []

    def adopt(joint: Joint) -> Run:
        joints.append(joint)
        raise Stop

    with contextlib.suppress(Stop):
        Traced(function, adopt, function, alone=alone)(*args, **kwargs)
    if not joints:
        raise CaptureError("torch.compile traced nothing; expected it to be enabled")
    return joints[0]
