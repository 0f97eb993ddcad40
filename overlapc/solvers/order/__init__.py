"""In which order ops are issued."""
