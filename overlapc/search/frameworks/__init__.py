"""What a framework does with a layout, and what it costs."""
