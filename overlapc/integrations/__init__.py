"""One line for training loops that hold the model themselves: `transformers` and `accelerate`."""
