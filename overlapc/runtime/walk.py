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

from overlapc.runtime.exchange import Exchange, busy
from overlapc.runtime.ranks import exchange_for
from overlapc.runtime.row import Links, Run
from overlapc.runtime.snapshot import as_it_was
from overlapc.runtime.stage import Shapes, Stage, blank, leaves_of
from overlapc.schedule import Schedule

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
    ranks call this together."""
    for stage, made in stages.items():
        lanes = made.captured.trace.lanes
        with exchange_for(lanes, links.timeout_s) as exchange:
            if exchange is not None:  # or one would walk, and wait for the others
                exchange.agree(
                    f"stage {stage}",
                    f"{made.captured.trace.digest} {wanted[stage]}",
                    "every rank of a stage must run the same module, on inputs of the same shapes, "
                    "with the same options",
                )
    of_ranks = told(links, "what stages want to see", wanted)
    each = {int(stage): count for of_rank in of_ranks for stage, count in of_rank.items() if count}
    if not each:
        return {}
    end, count = max(each), max(each.values())
    here: list[Arguments] = list(inputs[:count])
    found: dict[int, list[Arguments]] = {}
    for stage in range(end + 1):
        results: list[Arguments] = []
        if stage in stages:
            whole = stages[stage]
            is_last = stage == schedule.stages - 1
            ends = targets[:count] if is_last else [()] * count
            found[stage] = [(*one, *end) for one, end in zip(here, ends, strict=True)]
            if stage < end:
                with busy("running stages by eager", links.timeout_s):
                    results = [_results(whole, one) for one in found[stage]]
        if stage < end:
            # Ranks that wait in a round of an exchange are not taken for lost.
            told(links, f"stage {stage} has run by eager", {})
            with busy("handing results on", links.timeout_s):
                here = _handed_on(schedule, stage, results, count, shapes[stage], links)
    return found


def told(links: Links, what: str, mine: Mapping[int, Any]) -> list[dict[str, Any]]:
    """What each rank of the pipeline says of its stages."""
    with Exchange(dist.get_process_group_ranks(links.group), links.timeout_s) as exchange:
        return [json.loads(data) for data in exchange.gather(what, json.dumps(mine).encode())]


def _results(stage: Stage, given: Arguments) -> Arguments:
    with as_it_was(stage.module), torch.no_grad():
        results = stage.module(*leaves_of(given, stage.incoming))
    several = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(result.detach().contiguous() for result in several)


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
    run = Run(schedule, (), {}, {}, links)
    run.at = what = f"results of stage {stage} by eager"
    try:
        for microbatch, tensors in enumerate(each):
            for which, tensor in enumerate(tensors):
                tag = run.tag((stage + 1, True, microbatch, which))
                run.wait(run.post(how, tensor, tag, peer, what), what)
    finally:
        run.waiter.close()
    return list(each)
