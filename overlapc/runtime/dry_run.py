"""`walked` takes microbatches through a pipeline once, by eager, before its stages are planned.

What a stage is given is known only when the stages before it have run. Where sizes depend on data,
as the loads of experts do, it is planned for all microbatches of the step; where it is to be cut in
slices, these are compared with the first one whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from overlapc.core.errors import OptionError, RankError
from overlapc.core.schedule import Schedule
from overlapc.ranks.exchange import Exchange, busy
from overlapc.ranks.groups import exchange_for, ranks_of
from overlapc.runtime.executor import Links, RowRun
from overlapc.runtime.restored import as_it_was
from overlapc.runtime.stage import Shapes, Stage, blank, leaves_of

Arguments = tuple[Any, ...]  # of one call of a stage; on the last with its targets


def walked(
    schedule: Schedule,
    stages: Mapping[int, Stage],
    wanted: Mapping[int, int],
    shapes: Mapping[int, Shapes],
    inputs: Sequence[Arguments],
    targets: Sequence[Arguments],
    links: Links,
) -> dict[int, list[Arguments]]:
    """What stages of this rank are given, of as many microbatches as a stage of any rank `wanted`:
    all stages up to the last one that wanted any. `shapes` are those that every stage sends. All
    ranks call this together; if one raises, all do."""
    if not any(any(of_rank.values()) for of_rank in told(links, "what stages want", wanted)):
        return {}
    with busy("running stages by eager"), _everyone(stages, links) as everyone:
        said = {
            stage: [made.captured.trace.digest, wanted[stage], _ranks(made)]
            for stage, made in stages.items()
        }
        each = _agreed(everyone, _gathered(everyone, "what stages want to see", said))
        end, count = max(each, default=-1), max(each.values(), default=0)
        here: list[Arguments] = list(inputs[:count])
        found: dict[int, list[Arguments]] = {}
        for stage in range(end + 1):
            results: list[Arguments] = []
            if stage in stages:
                is_last = stage == schedule.stages - 1
                ends = targets[:count] if is_last else [()] * count
                found[stage] = [(*one, *more) for one, more in zip(here, ends, strict=True)]
                if stage < end:
                    results = _results(stages[stage], found[stage], shapes[stage], everyone)
            if stage < end:
                _gathered(everyone, f"stage {stage} has run by eager", {})
                here = _handed_on(schedule, stage, results, count, shapes[stage], links)
        return found


def told(links: Links, what: str, mine: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """What each rank of the pipeline says; keys come as text."""
    with _round(links) as ranks:
        return _gathered(ranks, what, mine)


def _round(links: Links) -> Exchange:
    return Exchange(dist.get_process_group_ranks(links.group), links.timeout_s)


def _everyone(stages: Mapping[int, Stage], links: Links) -> Exchange:
    """A round of the ranks of this pipeline and of all that share stages with it: in a stage's
    collectives one waits for another, so they walk alike, and fail together."""
    own = dist.get_process_group_ranks(links.group)
    known = set(own)
    for made in stages.values():
        with exchange_for(made.captured.trace.groups, links.timeout_s) as exchange:
            if exchange is not None:
                mine = json.dumps(own).encode()
                known.update(*map(json.loads, exchange.gather("ranks of pipelines", mine)))
    of_ranks = told(links, "ranks that share stages", {"ranks": sorted(known)})
    everyone = {rank for of_rank in of_ranks for rank in of_rank["ranks"]}
    return Exchange(sorted(everyone), links.timeout_s)


def _ranks(stage: Stage) -> list[int]:
    """The ranks that the stage's collectives join; none without any."""
    return ranks_of(stage.captured.trace.groups)


def _gathered(ranks: Exchange, what: str, mine: Mapping[Any, Any]) -> list[dict[str, Any]]:
    return [json.loads(data) for data in ranks.gather(what, json.dumps(mine).encode())]


def _agreed(everyone: Exchange, said: Sequence[dict[str, Any]]) -> dict[int, int]:
    """How many microbatches each stage of some rank wants, if any; raise on all ranks if those of
    one stage run other graphs."""
    of_rank = dict(zip(everyone.ranks, said, strict=True))
    wanted: dict[int, int] = {}
    for rank, stages in of_rank.items():
        for stage, (digest, count, ranks) in stages.items():
            for other in ranks:
                if of_rank[other].get(stage, ("none",))[0] != digest:
                    raise RankError(
                        f"the ranks disagree on stage {stage}: ranks {rank} and {other}, which its "
                        "collectives join, have other graphs of it; every rank must run the same "
                        "module on inputs of the same shapes"
                    )
            if count:
                wanted[int(stage)] = max(count, wanted.get(int(stage), 0))
    return wanted


def _results(
    stage: Stage, each: Sequence[Arguments], shapes: Shapes, everyone: Exchange
) -> list[Arguments]:
    """What the stage gives for these microbatches, by eager."""
    as_here = torch.autocast(
        "cpu",
        dtype=torch.get_autocast_dtype("cpu"),
        enabled=torch.is_autocast_enabled("cpu"),
        cache_enabled=torch.is_autocast_cache_enabled(),
    )

    def work() -> list[Arguments]:
        with as_here:  # another thread has none
            return [_sent(stage, given, shapes) for given in each]

    if not _ranks(stage):
        return work()
    return everyone.during(f"running stage {stage.number} by eager", work)


def _sent(stage: Stage, given: Arguments, shapes: Shapes) -> Arguments:
    """What a stage sends for one microbatch. A model may give something else without autograd than
    it was traced with; then it runs with it."""
    for has_autograd in (False, True):
        with as_it_was(stage.module), torch.set_grad_enabled(has_autograd):
            # copies: a stage may write into what it is given
            results = stage.module(*leaves_of(_copies(given), stage.incoming))
        several = results if isinstance(results, (tuple, list)) else (results,)
        sent = tuple(r.detach().contiguous() for r in several if isinstance(r, Tensor))
        kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in sent]
        if kinds == [(sizes, dtype) for sizes, dtype, _ in shapes]:
            return sent
    raise OptionError(
        f"stage {stage.number} gives {kinds} by eager, and was traced giving "
        f"{[(sizes, dtype) for sizes, dtype, _ in shapes]}; expected the same: what it sends may "
        "not depend on whether it is traced, nor on data"
    )


def _copies(given: Arguments) -> Arguments:
    return tuple(x.detach().clone() if isinstance(x, Tensor) else x for x in given)


def _handed_on(
    schedule: Schedule,
    stage: int,
    results: Sequence[Arguments],
    count: int,
    shapes: Shapes,
    links: Links,
) -> list[Arguments]:
    """Hand a stage's results of all microbatches to the next stage; return what this rank has of
    them."""
    source, target = (schedule.rank_of[s] for s in (stage, stage + 1))
    if source == target or links.rank not in (source, target):
        return list(results)
    sends = links.rank == source
    how, peer = (dist.isend, target) if sends else (dist.irecv, source)
    each = results if sends else [tuple(blank(s).detach() for s in shapes) for _ in range(count)]
    run = RowRun(schedule, (), {}, {}, links)
    run.at = what = f"results of stage {stage} by eager"
    try:
        for microbatch, tensors in enumerate(each):
            for which, tensor in enumerate(tensors):
                tag = run.tag((stage + 1, True, microbatch, which))
                run.wait(run.post(how, tensor, tag, peer, what), what, peer)
    finally:
        run.waiter.close()
    return list(each)
