"""The numbers that steer the solvers; what a module tries besides follows from these, or is a menu
that stands where it is tried."""

from __future__ import annotations

# How finely a search looks: counts of what is tried are a few of these.
RUNGS = 12  # steps in which memory is gone through; candidates for one place
FEW = 3  # of what is best so far, how many get more effort

# How long it looks.
EVALUATIONS = 90_000  # about how many ops are issued for one problem, in plans one after the other
MERGED = 1_500_000  # the same for merged pieces, for which there is no other search
LADDER = 9000  # ops times HEU's budgets, each of which has a program and a few orders
ACTIONS = 20_000  # about how many are simulated to polish a pipeline's rows
EXACT = 100_000  # issues, or segments of a partition, up to which all there are are gone through
LARGE = 1500  # ops from which on less is tried, for each takes longer
SMALL = 64  # ops up to which HEU tries the same budgets whatever it is given
SEARCHED = 28  # ops up to which OPT goes through all plans
AT_BOUND = 1 + 1e-4  # times the bound: nothing that is worth a search is faster
NEAR = 0.01  # a proven gap with which OPT leaves groups of blocks alone
GAP = 0.002  # with which a program's choice is as good as its best
SECONDS = 2.0  # for one program, which takes hundredths

# What a program thinks of the schedule that it does not see.
EXPOSED = 0.5  # share of a recomputed collective that nothing hides
ROOM = 0.2  # of the budget left to it where nothing would run again, else at most its square
THRIFT = 0.05  # of recompute's time is lost where it may be hidden for nothing
CLASSES = 400  # of ops bound on both sides that get columns of their own

# How a window is filled.
OVERSHOOT = 2.0  # times what is left of a window that a filler may take; its powers are tried, too
REACH = 120  # issues before and after a collective that are looked through
UNSURE = 0.25  # how often a seeded taste changes its mind
SOON = 2  # windows, within which recompute is due

# What repeats in a forward.
PERIODS = 32  # the commonest distances between like ops, which are tried as periods
LEAST = 4  # a repetition of less than this part of the forward is something inside of a layer
