"""The configurations, checked without allocating their parameters."""

import pathlib
import runpy

import jax
import pytest
from helpers import layers_of, mesh_of

from alibi_jax.config import POSITIONS, Config, ConfigError, flatten
from alibi_jax.model import abstract_model, initial_params
from alibi_jax.training.optimizers import make_schedule

CONFIGS = pathlib.Path(__file__).parent.parent / "configs"
LENGTHS = [64, 128, 256, 512, 1024, 1536, 2048, 3072]
# Vocabulary sizes of WikiText-103, and in fairseq: with three more special tokens, and padded to a
# multiple of 8.
WORDS, FAIRSEQ_WORDS = 267_735, 267_744


def config_of(name, *arguments):
    config = runpy.run_path(str(CONFIGS / name))["get_config"](*arguments)
    config.check()
    return config


def shapes(config, vocab_size):
    _, params = abstract_model(config, vocab_size, mesh_of(1, 1, 1, 1))
    return params


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def unused_rows(params, rows):
    """Parameters in the rows that only pad the tables and belong to no token."""
    tables = params["vocabulary"]["tables"]
    return sum((table.shape[0] - n) * table.shape[1] for table, n in zip(tables.values(), rows))


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.py")), ids=lambda path: path.stem)
def test_every_configuration_is_valid(path):
    assert isinstance(config_of(path.relative_to(CONFIGS)), Config)


# The options of the paper's training command and of fairseq's transformer_lm_wiki103.
WIKITEXT103 = {
    "data.dataset": "wikitext",
    "data.tokenizer": "words",
    "model.num_layers": 16,
    "model.width": 1024,
    "model.num_heads": 8,
    "model.ff_width": 4096,
    "model.activation": "relu",
    "model.norm": "layernorm",
    "model.norm_epsilon": 1e-5,
    "model.final_norm": False,
    "model.use_bias": True,
    "model.initialization": "fairseq",
    "model.tied_embeddings": True,
    "model.adaptive_cutoffs": "20000,60000",
    "model.adaptive_factor": 4,
    "model.dropout": 0.3,
    "model.attention_dropout": 0.1,
    "model.activation_dropout": 0.1,
    "model.adaptive_dropout": 0.2,
    "optimizer.name": "sgd",
    "optimizer.momentum": 0.99,
    "optimizer.learning_rate": 1.0,
    "optimizer.weight_decay": 0.0,
    "optimizer.clip_norm": 0.1,
    "optimizer.warmup_steps": 16_000,
    "train.steps": 286_000,
    "train.seed": 1,
}


@pytest.mark.parametrize("length", LENGTHS)
def test_wikitext103_has_the_papers_options_at_every_length(length):
    config = config_of("paper/wikitext103.py", str(length))
    assert flatten(config).items() >= (WIKITEXT103 | {"train.length": length}).items()
    # Each of 8 GPUs has whole windows of at most 9,216 tokens together: four windows of 2,048.
    expected = 8 * 4 * 2048 if length == 2048 else 8 * 9216
    assert config.train.batch_size * length == expected


@pytest.mark.parametrize(
    ("name", "length"),
    [("wikitext103", x) for x in ("0", "", "abc", "9217", "²")] + [("large", "0"), ("large", "3")],
)
def test_an_invalid_training_length_is_refused(name, length):
    with pytest.raises(ConfigError, match=f"'{length}' is no training length"):
        config_of(f"paper/{name}.py", length)


@pytest.mark.slow
def test_projections_are_initialized_as_in_fairseq():
    """The standard deviations of fairseq's MultiheadAttention and of torch.nn.Linear's default."""
    config = config_of("paper/wikitext103.py")
    config.model.num_layers = 1
    params = jax.jit(lambda key: initial_params(config, 70_000, key))(jax.random.key(0))
    (layer,) = layers_of(params)
    third = 3**-0.5
    expected = {
        "query": (third * (6 / 2048 / 2) ** 0.5, third / 32),
        "key": (third * (6 / 2048 / 2) ** 0.5, third / 32),
        "value": (third * (6 / 2048 / 2) ** 0.5, third / 32),
        "out": (third * (6 / 2048) ** 0.5, 0.0),
        "up": (third / 32, third / 32),
        "down": (third / 64, third / 64),
    }
    for name, (kernel, bias) in expected.items():
        projection = layer["ff" if name in ("up", "down") else "attention"][name]
        assert float(projection["kernel"].std()) == pytest.approx(kernel, rel=0.01)
        assert float(projection["bias"].std()) == pytest.approx(bias, rel=0.1)


def test_wikitext103_has_the_parameters_of_the_papers_model():
    """Counted by hand from fairseq's transformer_lm_wiki103."""
    layer = 4 * (1024 * 1024 + 1024) + 1024 * 4096 + 4096 + 4096 * 1024 + 1024 + 2 * 2 * 1024
    projections = 1024 * (1024 + 256 + 64)

    def num_params(words):
        tables = 20_000 * 1024 + 40_000 * 256 + (words - 60_000) * 64
        return 16 * layer + tables + projections + 2 * 1024

    assert num_params(FAIRSEQ_WORDS) == 246_933_504
    config = config_of("paper/wikitext103.py")
    for words in (WORDS, FAIRSEQ_WORDS):
        params = shapes(config, words)
        unused = unused_rows(params, (20_002, 40_000, words - 60_000))
        assert size(params) - unused == num_params(words)
        assert size(params) == 247_046_144


# Parameters that a position method adds to the model; ALiBi adds none. T5 adds one table of 32
# buckets for all layers, learned positions a table of the training length. Other methods add
# parameters to each layer: a projection of sinusoids with two biases, gates, or small networks.
ADDED_PARAMETERS = {"t5": 32 * 8, "learned": 512 * 1024, "alibi_learned": 8}


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.sample(6)
def test_wikitext103_of_every_position_method(position):
    config = config_of("paper/wikitext103.py")
    alibi = size(shapes(config, WORDS))
    config.model.position = position
    config.check()
    added = size(shapes(config, WORDS)) - alibi
    if position in ADDED_PARAMETERS:
        assert added == ADDED_PARAMETERS[position]
    elif position in ("transformer_xl", "kerple_log", "kerple_power", "fire", "fox"):
        assert added > 0
        assert added % 16 == 0
    else:
        assert added == 0


def test_the_learning_rate_follows_fairseqs_cosine_schedule():
    """Warm-up is one step ahead, because the rate of fairseq's first step is 1e-7."""
    optimizer = config_of("paper/wikitext103.py").optimizer
    schedule = make_schedule(optimizer, 286_000)
    assert float(schedule(0)) == pytest.approx(1 / 16_001, abs=1e-6)
    assert float(schedule(15_999)) == pytest.approx(1.0, rel=1e-4)
    assert float(schedule(16_000)) == pytest.approx(1.0)
    assert float(schedule(16_000 + 135_000)) == pytest.approx((1 + 1e-4) / 2)
    assert float(schedule(286_000)) == pytest.approx(1e-4, rel=1e-3)


def test_the_large_model_has_1_3_billion_parameters():
    config = config_of("paper/large.py")
    layer = 4 * (2048**2 + 2048) + 2 * 2048 * 8192 + 8192 + 2048 + 4 * 2048
    expected = 25 * layer + 50_304 * 2048 + 2 * 2048
    assert size(shapes(config, config.data.vocab_size)) == expected == 1_361_983_488
    for length in (512, 1024, 2048):
        config = config_of("paper/large.py", str(length))
        assert config.train.batch_size * length == 2**21
