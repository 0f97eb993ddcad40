"""The search finds which layout, schedule and plan of a model on a cluster is fastest."""
