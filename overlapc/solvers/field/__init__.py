"""What others run: the baselines."""
