"""Planning takes a captured graph to a plan. Begin with `road.py`.

`options` says what was asked for, `problem` what is to be solved, `agreement` what ranks tell each
other, `report` what was decided, and `rows` what a pipeline's ranks do when.
"""
