"""The numbers that steer the solvers. Other numbers follow from these, or are menus, which stand in
the module that tries them."""

from __future__ import annotations

# How fine a search is; modules use small multiples of these.
RUNGS = 12  # steps of memory; candidates for one place
STEPS = 96  # to so many steps of what all take, limits of a ladder's quick programs are rounded
FEW = 3  # so many of the best get more effort

# How long a search looks.
EVALUATIONS = 90_000  # about how many ops all tried plans of a problem have together
MERGED = 1_500_000  # the same for merged microbatches, which have no other search
LADDER = 9000  # ops times HEU's budgets; each budget has a program and a few orders
ACTIONS = 20_000  # about how many actions are simulated to polish a pipeline's rows
EXACT = 100_000  # issues, or segments of a partition, up to which the search is exhaustive
LARGE = 1500  # from so many ops on fewer plans are tried, since each takes longer
SMALL = 64  # up to so many ops HEU tries the same budgets for every budget
SEARCHED = 28  # up to so many ops OPT goes through all plans
AT_BOUND = 1 + 1e-4  # times the bound: a plan so close to it ends the search
NEAR = 1.05  # times the bound of one by one: merged microbatches so close are not searched twice
GAP = 0.002  # relative gap at which a program's solution counts as optimal
SECONDS = 2.0  # time limit of one program, which usually takes hundredths

# What a program assumes of the schedule, which it does not see.
EXPOSED = 0.5  # share of a recomputed collective that stays exposed
# share of the budget left to the schedule where nothing is recomputed; else at most its square
ROOM = 0.2
THRIFT = 0.05  # share of recompute's time that counts even where windows hide it

# How a window is filled.
# a filler may take so many times what is left of a window; its powers are tried, too
OVERSHOOT = 2.0
REACH = 120  # issues before and after a collective that are candidates for its window
