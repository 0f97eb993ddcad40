"""These modules turn timelines into what users read. Torch-free."""
