"""The positions, segments and indices of the queries and the keys in a forward pass.

Axes: B batch, T queries, S keys.
"""

from typing import NamedTuple

from jaxtyping import Array, Int


class TokenLayout(NamedTuple):
    """The positions and segments of queries and keys.

    All layers share one layout, except that the final layer may have fewer queries.

    Query t has the index `offset` + t among the keys. With `consecutive_positions`, the positions
    in a segment are consecutive, so that two tokens are as far apart by position as by index.
    """

    query_positions: Int[Array, "*#B T"]
    key_positions: Int[Array, "*#B S"]
    query_segment_ids: Int[Array, "B T"] | None
    key_segment_ids: Int[Array, "B S"] | None
    offset: int | Int[Array, ""]
    consecutive_positions: bool

    @property
    def num_queries(self) -> int:
        """The number of queries in a row; they are the last tokens of a layer's input."""
        return self.query_positions.shape[-1]

    @property
    def queries_are_keys(self) -> bool:
        """Whether queries and keys are the same tokens; with a cache they are not."""
        starts_at_zero = isinstance(self.offset, int) and self.offset == 0
        return starts_at_zero and self.num_queries == self.key_positions.shape[-1]

    def last_queries(self, number: int) -> "TokenLayout":
        """The layout with the last `number` queries only, and with all keys."""
        start = self.num_queries - number
        ids = self.query_segment_ids
        return self._replace(
            query_positions=self.query_positions[..., start:],
            query_segment_ids=None if ids is None else ids[:, start:],
            offset=self.offset + start,
        )
