"""Taking tokens to their experts and back: the names that models use, which `dualpipe.kernels.routing` implements.

They are differentiable functions without parameters, so there is no weight gradient to defer and nothing to add here.
"""

from dualpipe.kernels.routing import SortedTokens, combine_tokens, dispatch_tokens, sort_tokens

__all__ = ["SortedTokens", "combine_tokens", "dispatch_tokens", "sort_tokens"]
