"""How far a mean would move with other text: the bootstrap over documents."""

import dataclasses

import numpy as np
from jaxtyping import Float, Float64, Int64, Integer

CONFIDENCE = 0.95
_RESAMPLES = 2000
# With fewer documents, to draw whole ones says little: then it is stretches of the text. With more
# than the most, neighbours are drawn together.
_ENOUGH, _MOST = 10, 1000
_STRETCHES = 32
# Of fewer groups than this, resamples say nothing.
_LEAST = 5


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Targets in groups that are drawn as a whole, since what they share makes their losses alike.

    `ids[t]` is the group of target t. The same groups are drawn for whatever is compared.
    """

    ids: Int64[np.ndarray, "M"]
    kind: str
    seed: int

    def __str__(self) -> str:
        """What is drawn; empty where there is too little for that."""
        return f"{self._count} {self.kind}" if self._count >= _LEAST else ""

    @property
    def _count(self) -> int:
        return int(self.ids.max()) + 1

    def sums(self, values: Float[np.ndarray, "M"]) -> Float64[np.ndarray, "C"]:
        """By group."""
        return np.bincount(self.ids, values, self._count)

    def resampled(self, values: Float[np.ndarray, "M"]) -> Float64[np.ndarray, "R"]:
        """Means of `values` with as many groups drawn anew, with replacement, R times."""
        count = self._count
        draws = np.random.default_rng(self.seed).multinomial(
            count, np.full(count, 1 / count), _RESAMPLES
        )
        return (draws @ self.sums(values)) / (draws @ np.bincount(self.ids, minlength=count))

    def estimate(self, values: Float[np.ndarray, "M"]) -> dict[str, float | None]:
        """{"nats", "low", "high"}: the mean of `values`, and where 95 % of resampled ones lie.

        Of very few groups there is no interval: None.
        """
        mean = float(values.mean(dtype=np.float64))
        if self._count < _LEAST:
            return {"nats": mean, "low": None, "high": None}
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(self.resampled(values), [tail, 100 - tail])
        return {"nats": mean, "low": float(low), "high": float(high)}


def clusters(
    targets: Integer[np.ndarray, "M"], document_starts: Integer[np.ndarray, "D"], seed: int
) -> Clusters:
    """Documents, where the targets are of ten or more; else stretches of as many targets each.

    More than a thousand documents are put together in groups of neighbours. `targets` are indices
    in the stream, in order.
    """
    documents = np.searchsorted(document_starts, targets, side="right") - 1
    present, ids = np.unique(documents, return_inverse=True)
    if len(present) > _MOST:
        return Clusters(ids * _MOST // len(present), "groups of documents", seed)
    if len(present) >= _ENOUGH:
        return Clusters(ids, "documents", seed)
    stretches = min(_STRETCHES, len(targets))
    ids = np.arange(len(targets)) * stretches // len(targets)
    return Clusters(ids, "stretches of text", seed)
