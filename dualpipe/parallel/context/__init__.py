"""Context parallelism: ranks share sequences, and exchange keys and values in a ring, or heads by all-to-all."""

from dualpipe.parallel.context.context_parallel import ContextParallel, method_for

__all__ = ["ContextParallel", "method_for"]
