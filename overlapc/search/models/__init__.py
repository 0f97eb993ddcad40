"""Models to search for: presets, configs, blocks and their modules."""
