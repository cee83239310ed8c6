"""Context parallelism: the ranks of a group share each sequence, and attention sees all of it.

Each rank has the tokens that `SequenceSplit` says and computes on them alone, but for attention. What that reads of
other ranks is brought by `Communicate` segments, which the pipeline hides behind its other micro-batch. By one of

    ring         Rows of keys and values go from rank to rank, size - 1 times. While the next ones travel, the queries
                 attend to those that are here (Liu et al., arXiv:2310.01889); a token's results are merged by the
                 log-sum-exp of its scores. Of latent attention the latent travels, which each rank expands itself.
    window       Of a layer with a sliding window only those rows travel that the window of one of the tokens reaches.
    all_to_all   A rank gets some of the heads of all tokens, and sends back what they found (DeepSpeed-Ulysses,
                 arXiv:2309.14509). The ranks must divide the heads, those of queries and those of keys and values.

Rows that have arrived are not kept for the backward of a ring or a window: they travel once more before, and their
gradients then go the same way back. What is kept of attention are the rank's own queries, rows and results, so that
activations fall as 1 / size, but for the rows of one layer at a time, while its backward runs. With C a token's numbers
in keys and values, or the latent, a rank sends for a token of its own 3 (size - 1) C numbers by the ring in all, and
2 (size - 1) / size times the numbers of its queries, keys, values and results by heads. "auto" takes what is less.

torch's own `context_parallel` (torch.distributed.tensor.experimental, 2.13) does not serve: it replaces
`scaled_dot_product_attention` of the whole process, on CUDA alone, by operators that exchange and wait within, where a
pipeline can hide nothing, and that know no documents; its way for FlexAttention gathers all keys and values first, of
sequences in multiples of 128 tokens for each rank.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from dualpipe.nn.segments import Segment
from dualpipe.parallel.all_to_all import AsyncAllToAll
from dualpipe.parallel.context.ring import Ring, Window, row_width
from dualpipe.parallel.context.row_exchange import SequenceRanks, SharedAttention
from dualpipe.parallel.context.ulysses import ByHeads, heads_width

METHODS = ("auto", "ring", "all_to_all")


class ContextParallel(SequenceRanks):
    """The ranks that share sequences; attention layers take their segments from it.

    mesh: the mesh's "cp" dimension, or an `AsyncAllToAll`; None or one rank: sequences are whole. method: one of
    `METHODS`; layers with a window exchange what that needs, by any. Raises ValueError for another one.
    """

    def __init__(self, mesh: DeviceMesh | AsyncAllToAll | None, *, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        super().__init__(mesh)
        self._method = method

    def method_of(self, attention: SharedAttention) -> str:
        """"window", "ring" or "all_to_all"; see `method_for`."""
        return method_for(attention, self.split.size, self._method)

    def segments(self, attention: SharedAttention, recompute: bool) -> list[Segment]:
        """From "normed" and "context" to "y". recompute: whether all of it is computed again before the backward, not
        only what has travelled."""
        if self.method_of(attention) == "all_to_all":
            return ByHeads(self, attention).segments(recompute)
        return (Ring if attention.window is None else Window)(self, attention).segments(recompute)


def method_for(attention: SharedAttention, ranks: int, method: str) -> str:
    """Return the method of a layer, "window", "ring" or "all_to_all", for one of `METHODS` and a number of ranks.

    Raises ValueError where the heads cannot be divided among the ranks, as "all_to_all" needs.
    """
    if attention.window is not None:
        return "window"
    heads, kv_heads = attention.num_heads, attention.num_kv_heads
    fits = heads % ranks == 0 and kv_heads % ranks == 0
    if method == "all_to_all" and not fits:
        raise ValueError(f"{heads} heads of queries and {kv_heads} of keys and values cannot be divided evenly among "
                         f"{ranks} context-parallel ranks; use the method ring, or a number of ranks that divides both")
    less = 2 * heads_width(attention) <= 3 * ranks * row_width(attention)
    return "all_to_all" if fits and (method == "all_to_all" or (method == "auto" and less)) else "ring"
