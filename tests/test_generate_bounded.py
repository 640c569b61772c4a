import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from alibi_jax.config import Model
from alibi_jax.generate import generate, generate_tokens, prefill
from alibi_jax.model import Transformer

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB, LENGTH = 11, 150
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [7]]
NEGLIGIBLE = 2.0**-24


def make(position="alibi", **model):
    """A model of eight heads, with widely spread scores, that does not repeat one token."""
    values = {"num_layers": 1, "width": 32, "num_heads": 8, "tied_embeddings": False} | model
    config = Model(position=position, **values)
    made = Transformer(config, vocab_size=VOCAB, train_length=32, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(8)
    for leaf in jax.tree.leaves(
        nnx.state(made, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        drawn = np.asarray(leaf[...]) + 0.2 * rng.normal(size=leaf.shape)
        leaf[...] = jnp.asarray(drawn, jnp.float32)
    return made


def some_tokens(batch=2, length=LENGTH, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length)).astype(np.int32)


def lengths_of(cache):
    return [[group.slots.key.shape[1] for group in layer.groups] for layer in cache.layers]


def whole(model, tokens, ids):
    """Hidden states of one forward pass over all tokens; positions do not count padding."""
    graphdef, params = nnx.split(model)
    run = jax.jit(
        lambda p, tokens, ids, positions: nnx.merge(graphdef, p).hidden_states(
            tokens, segment_ids=ids, positions=positions
        )
    )
    positions = np.maximum(ids.cumsum(1) - 1, 0)
    return np.asarray(run(params, *(jnp.asarray(x, jnp.int32) for x in (tokens, ids, positions))))


def stepper(model):
    """`hidden_states_with_cache`, compiled once for each chunk size."""
    graphdef, params = nnx.split(model)
    run = jax.jit(
        lambda p, cache, tokens, token_mask: nnx.merge(graphdef, p).hidden_states_with_cache(
            tokens, cache, token_mask=token_mask
        )
    )

    def step(cache, tokens, token_mask):
        return run(params, cache, jnp.asarray(tokens), jnp.asarray(token_mask))

    return step


def in_chunks(step, chunks, tokens, cache, ids):
    hidden, start = [], 0
    for chunk in chunks:
        part = slice(start, start + chunk)
        out, cache = step(cache, tokens[:, part], ids[:, part] == 1)
        hidden.append(out)
        start += chunk
    return np.concatenate(hidden, axis=1), cache


# The cache.


def test_b8_d5_chunks_over_a_bounded_cache_are_the_whole():
    """keras-team/keras-hub#2861, Lightning-AI/litgpt#2182: single tokens, more than the slots."""
    # Each layer has groups of its own. A key head serves two query heads. Slopes can be learned.
    model, tokens = make("alibi,alibi_learned", num_kv_heads=4, num_layers=2), some_tokens()
    method = model.positions["alibi_learned"]
    method.log_slopes[...] = method.log_slopes[...] - 0.5
    ids = np.ones_like(tokens)
    ids[1, :7] = ids[1, 30:35] = 0
    cache = model.init_cache(2, LENGTH, tolerance=NEGLIGIBLE, gap=10.0)
    # Only the heads with steep slopes have fewer slots than there are tokens.
    assert lengths_of(cache) == [[128, LENGTH], [LENGTH]]
    out, cache = in_chunks(stepper(model), [*[1] * 15, 130, *[1] * 5], tokens, cache, ids)
    hidden = whole(model, tokens, ids)
    np.testing.assert_allclose(out[ids == 1], hidden[ids == 1], atol=1e-5)
    # Keys were omitted, and their share is proved to be small.
    assert (cache.omitted_share > 0).all()
    assert (cache.omitted_share <= NEGLIGIBLE).all()
    np.testing.assert_array_equal(cache.row_lengths, ids.sum(1))
    assert cache.num_tokens == LENGTH


def test_a_bounded_cache_has_no_end():
    """A cache too short for its heads bounds the share of attention that it omits."""
    model, tokens = make(), some_tokens(length=72)
    ids = np.ones_like(tokens)
    cache = model.init_cache(2, 32, tolerance=0.1, gap=6.0)
    assert lengths_of(cache) == [[32]]
    out, cache = in_chunks(stepper(model), [32, *[1] * 40], tokens, cache, ids)
    hidden = whole(model, tokens, ids)
    np.testing.assert_allclose(out[:, :32], hidden[:, :32], atol=1e-5)
    assert np.isfinite(out).all()
    assert np.abs(out - hidden).max() > 1e-3
    assert (cache.omitted_share > 0.1).all()


def test_memory_does_not_grow_where_slopes_are_steep():
    model = make(width=64, num_heads=8)

    def size(capacity, **bounds):
        cache = jax.eval_shape(lambda: model.init_cache(1, capacity, **bounds))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)), cache

    bounds = {"tolerance": 1e-3, "gap": 10.0}
    (at_8k, cache), (at_64k, _) = (size(capacity, **bounds) for capacity in (8192, 65536))
    assert lengths_of(cache) == [[64, 128, 256, 512, 1024, 2048, 4096, 8192]]
    assert at_8k == at_64k
    # A slot: 8 + 8 features, position, segment id. A group: 3 more numbers. The cache: 2 more.
    slots = sum(64 << n for n in range(8))
    assert at_64k == 4 * (slots * (2 * 8 + 2) + 8 * 3 + 2)
    # 29 times less than all keys if no head reaches to the end; half as much if one head does.
    assert 28 < size(65536)[0] / at_64k < 30
    assert 2.3 < size(4096)[0] / size(4096, **bounds)[0] < 2.6


@pytest.mark.parametrize(
    ("position", "bounds", "message"),
    [
        ("t5", {"tolerance": 0.1, "gap": 6.0}, "position='t5' is not a linear bias alone"),
        ("rotary", {"tolerance": 0.1, "gap": 6.0}, "position='rotary' is not a linear bias alone"),
        ("fox", {"tolerance": 0.1, "gap": 6.0}, "position='fox' is not a linear bias alone"),
        ("alibi,none", {"tolerance": 0.1, "gap": 6.0}, "position='none' .* give no tolerance"),
        ("alibi", {"tolerance": 0.1}, "tolerance=0.1 and gap=None: give both"),
        ("alibi", {"gap": 6.0}, "tolerance=None and gap=6.0: give both"),
        ("alibi", {"tolerance": 0.0, "gap": 6.0}, "tolerance=0.0 must be above 0"),
        ("alibi", {"tolerance": 0.1, "gap": float("nan")}, "gap=nan"),
    ],
)
@pytest.mark.sample(3)
def test_methods_and_options_that_bound_no_cache_are_refused(position, bounds, message):
    with pytest.raises(ValueError, match=message):
        make(position, num_layers=2).init_cache(2, 64, **bounds)


def test_a_method_that_also_rotates_keys_is_refused():
    model = make()

    class RotatedAlibi(type(model.positions["alibi"])):
        def rotate(self, query, key, query_positions, key_positions):
            return query, key * key_positions[..., None, None]

    model.positions["alibi"] = RotatedAlibi(num_heads=8)
    with pytest.raises(ValueError, match="position='alibi' is not a linear bias alone"):
        model.init_cache(2, 64, tolerance=0.1, gap=6.0)


def test_a_bounded_cache_can_be_made_while_tracing():
    """The slopes, which determine shapes, are concrete even there."""
    model = make()
    traced = jax.jit(lambda: model.init_cache(2, 300, tolerance=0.1, gap=6.0))()
    made = model.init_cache(2, 300, tolerance=0.1, gap=6.0)
    jax.tree.map(np.testing.assert_array_equal, traced, made)


# Generating.


# All tests below have the same shapes, which are compiled once: the steepest head keeps 64 keys,
# the others keep all 84.
OPTIONS = {"cache_tolerance": NEGLIGIBLE, "cache_gap": 10.0}


def test_generates_the_same_and_compiles_once(compiled):
    model = make()
    prefill.clear_cache()
    generate_tokens.clear_cache()
    bounded = generate(model, PROMPTS, 80, **OPTIONS)
    assert generate(model, PROMPTS[::-1], 80, **OPTIONS) == bounded[::-1]
    assert compiled.count("prefill") == compiled.count("generate_tokens") == 1
    assert generate(model, PROMPTS, 80) == bounded


@pytest.mark.parametrize(("scale", "share"), [(10.0, "1"), (float("nan"), "nan")])
def test_a_gap_that_was_too_narrow_is_reported(scale, share):
    model = make()
    kernel = model.layers.stacks[0].attention.query.kernel
    kernel[...] = kernel[...] * scale
    message = (
        f"the cache omitted up to {share} of a token's attention, more than "
        "cache_tolerance=5.96046e-08: give a cache_gap above 10"
    )
    with pytest.raises(ValueError, match=message):
        generate(model, PROMPTS, 80, **OPTIONS)


def test_what_comes_after_a_stop_does_not_count():
    model = make()
    graphdef, params = nnx.split(model)
    tokens = jnp.asarray(some_tokens(4, 5))

    def run(stop_token):
        cache = model.init_cache(4, 84, tolerance=NEGLIGIBLE, gap=10.0)
        assert lengths_of(cache) == [[64, 84]]
        logits, cache = prefill(graphdef, params, tokens, np.ones((4, 5), bool), cache)
        keys = jax.random.split(jax.random.key(0), 4)
        options = jnp.float32(0.0), jnp.float32(1.0), jnp.int32(stop_token), 80, False
        return generate_tokens(graphdef, params, cache, logits, keys, *options)

    new, cache = run(-1)
    assert (cache.omitted_share > 0).all()
    stop = int(new[2, 0])
    # Rows that stopped before the first eviction.
    stopped = (np.asarray(new)[:, :50] == stop).any(axis=1)
    assert 0 < stopped.sum() < 4
    _, cache = run(stop)
    np.testing.assert_array_equal(cache.omitted_share == 0, stopped)
