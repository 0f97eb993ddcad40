"""Which layout, schedule and plan is fastest: models, layouts of a cluster, and the search."""
