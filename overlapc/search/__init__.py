"""`search` finds the fastest layout, schedule and plan of a model on a cluster."""
