"""A batch in slices that hide each other's communication."""
