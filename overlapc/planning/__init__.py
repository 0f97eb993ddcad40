"""Planning takes a captured graph to a plan. Begin with `road.py`.

`options` has what the user asks for, `problem` what solvers are given, `agreement` what ranks
exchange, `report` what was decided, and `rows` the order of a pipeline's actions on each rank.
"""
