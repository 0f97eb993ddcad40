"""A stand-in for mamba-ssm on CPU, for tests alone: what Megatron's training calls of it, with its
names and signatures (held against its sources by `stand_in_sources.py`). Like its kernels, these
ask for the addresses of tensors."""

__version__ = "2.3.2"
