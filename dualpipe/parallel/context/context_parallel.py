"""Context parallelism: the ranks of a group share each sequence, and attention reads all of it.

Each rank holds the tokens that `SequenceSplit` assigns to it. Attention alone reads tokens of other ranks, exchanged by
`Communicate` segments, which the pipeline overlaps with the other action of a pair. A row has the keys and values of
one token; with latent attention it has the latent, which each rank expands. There are three methods, for `size` ranks:

    ring         Rows move from rank to rank, size - 1 times. While the next rows are in flight, the queries attend to
                 the current ones (Ring Attention, arXiv:2310.01889); the outputs of a token are merged by the
                 log-sum-exp of its scores.
    window       In a layer with a sliding window, a rank receives only the rows that the windows of its tokens reach.
    all_to_all   Each rank computes some of the heads for all tokens (DeepSpeed-Ulysses, arXiv:2309.14509). The number
                 of ranks must divide the query heads and the key/value heads.

Received rows are not saved for the backward of a ring or a window: they are sent again before it, and their gradients
return the same way. Attention saves the rank's queries, rows and outputs, so that activations fall as 1 / size, except
for the rows of one layer at a time while its backward runs. With C elements in a row, a rank sends 3 (size - 1) C
elements for each of its tokens in the ring (forward, recompute and gradients), and 2 (size - 1) / size times the
elements of its queries, keys, values and outputs with all_to_all (forward and gradients). "auto" chooses the smaller
number.

torch's `context_parallel` (torch.distributed.tensor.experimental, 2.13) is not used: it replaces
`scaled_dot_product_attention` in the whole process, on CUDA only, by operators that communicate and wait internally, so
that a pipeline can overlap nothing, and that do not support documents. Its version for FlexAttention gathers all keys
and values first, and needs a multiple of 128 tokens on each rank.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from dualpipe.nn.segments import Segment
from dualpipe.parallel.all_to_all import AllToAll
from dualpipe.parallel.context.ring import RingAttention, WindowAttention, row_width
from dualpipe.parallel.context.row_exchange import SequenceRanks, SharedAttention
from dualpipe.parallel.context.ulysses import UlyssesAttention, heads_width

METHODS = ("auto", "ring", "all_to_all")


class ContextParallel(SequenceRanks):
    """Ranks that share sequences, with the method of their attention; attention layers take their segments from it.

    mesh: the mesh's "cp" dimension, or an `AllToAll`; None or one rank: sequences are whole. method: one of
    `METHODS`; a layer with a sliding window always uses "window". Raises ValueError for another method.
    """

    def __init__(self, mesh: DeviceMesh | AllToAll | None, *, method: str = "auto") -> None:
        if method not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}; got {method!r}")
        super().__init__(mesh)
        self._method = method

    def method_of(self, attention: SharedAttention) -> str:
        """Return the method of a layer: "window", "ring" or "all_to_all"; see `method_for`."""
        return method_for(attention, self.split.size, self._method)

    def segments(self, attention: SharedAttention, recompute: bool) -> list[Segment]:
        """Return a layer's segments, which read "normed" and "context" and write "y".

        recompute: recompute all segments before the backward, not only those of received rows.
        """
        if self.method_of(attention) == "all_to_all":
            return UlyssesAttention(self, attention).segments(recompute)
        if attention.window is None:
            return RingAttention(self, attention).segments(recompute)
        return WindowAttention(self, attention).segments(recompute)


def method_for(attention: SharedAttention, ranks: int, method: str) -> str:
    """Return the method of a layer, "window", "ring" or "all_to_all", for one of `METHODS` and a number of ranks.

    Raises ValueError if the method is "all_to_all" and the ranks cannot divide the heads.
    """
    if attention.window is not None:
        return "window"
    heads = attention.num_heads
    kv_heads = attention.num_kv_heads
    fits = heads % ranks == 0 and kv_heads % ranks == 0
    if method == "all_to_all" and not fits:
        raise ValueError(f"{heads} heads of queries and {kv_heads} of keys and values cannot be divided evenly among "
                         f"{ranks} context-parallel ranks; use the method ring, or a number of ranks that divides both")
    sends_less = 2 * heads_width(attention) <= 3 * ranks * row_width(attention)
    if method == "all_to_all" or (method == "auto" and fits and sends_less):
        return "all_to_all"
    return "ring"
