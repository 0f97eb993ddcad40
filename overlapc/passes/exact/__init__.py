"""Where tracing differs from eager, and what mends it."""
