"""Context parallelism: ranks share sequences, and exchange keys and values in a ring, or heads by all-to-all.

Imports `parallel.all_to_all` and `nn`.
"""

from dualpipe.parallel.context.context_parallel import ContextParallel, method_for

__all__ = ["ContextParallel", "method_for"]
