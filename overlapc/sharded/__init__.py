"""Models that FSDP2 shards, lowered in place: their gathers and reductions are in graphs."""
