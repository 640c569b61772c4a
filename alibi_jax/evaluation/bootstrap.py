"""Confidence intervals of mean losses: the bootstrap over documents or stretches of the text."""

import dataclasses

import numpy as np
from jaxtyping import Float, Float64, Int64, Integer

CONFIDENCE = 0.95
_RESAMPLES = 2000
# Resamples of fewer whole documents say little; stretches of the text are drawn then.
_MIN_DOCUMENTS = 10
# With more documents than this, neighbouring documents are drawn together.
_MAX_GROUPS = 1000
_NUM_STRETCHES = 32
# Resamples of fewer groups say nothing.
_MIN_GROUPS = 5


@dataclasses.dataclass(frozen=True)
class Clusters:
    """Groups of targets that are resampled as a whole, since losses within a group are correlated.

    `ids[t]` is the group of target t. One instance draws the same groups for all values that are
    compared.
    """

    ids: Int64[np.ndarray, "M"]
    kind: str
    seed: int

    def __str__(self) -> str:
        """What is resampled, as "12 documents"; empty where there are too few groups."""
        return f"{self._num_groups} {self.kind}" if self._num_groups >= _MIN_GROUPS else ""

    @property
    def _num_groups(self) -> int:
        return int(self.ids.max()) + 1

    def sums(self, values: Float[np.ndarray, "M"]) -> Float64[np.ndarray, "C"]:
        """The sum of `values` in each group."""
        return np.bincount(self.ids, values, self._num_groups)

    def resampled_means(self, values: Float[np.ndarray, "M"]) -> Float64[np.ndarray, "R"]:
        """The means of `values` in R resamples, each of C groups drawn with replacement."""
        count = self._num_groups
        draws = np.random.default_rng(self.seed).multinomial(
            count, np.full(count, 1 / count), _RESAMPLES
        )
        return (draws @ self.sums(values)) / (draws @ np.bincount(self.ids, minlength=count))

    def estimate(self, values: Float[np.ndarray, "M"]) -> dict[str, float | None]:
        """{"nats", "low", "high"}: the mean of `values` and its 95 % percentile interval.

        "low" and "high" are None where there are too few groups.
        """
        mean = float(values.mean(dtype=np.float64))
        if self._num_groups < _MIN_GROUPS:
            return {"nats": mean, "low": None, "high": None}
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(self.resampled_means(values), [tail, 100 - tail])
        return {"nats": mean, "low": float(low), "high": float(high)}


def make_clusters(
    targets: Integer[np.ndarray, "M"], document_starts: Integer[np.ndarray, "D"], seed: int
) -> Clusters:
    """Groups targets by document; if there are fewer than ten documents, by stretch of the text.

    Stretches have equal numbers of targets. Their intervals speak of other stretches of the same
    documents, not of other documents. With more than a thousand documents, neighbouring
    documents form a group. `targets` are indices in the stream, in order.
    """
    documents = np.searchsorted(document_starts, targets, side="right") - 1
    present, ids = np.unique(documents, return_inverse=True)
    if len(present) > _MAX_GROUPS:
        return Clusters(ids * _MAX_GROUPS // len(present), "groups of documents", seed)
    if len(present) >= _MIN_DOCUMENTS:
        return Clusters(ids, "documents", seed)
    stretches = min(_NUM_STRETCHES, len(targets))
    ids = np.arange(len(targets)) * stretches // len(targets)
    return Clusters(ids, "stretches of text", seed)
