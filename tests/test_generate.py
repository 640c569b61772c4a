import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alibi_jax.config import POSITIONS, Model
from alibi_jax.data.tokenizers import ByteTokenizer
from alibi_jax.generate import generate, generate_tokens, nucleus, prefill
from alibi_jax.model import Transformer
from alibi_jax.positions.biased import Alibi

pytestmark = pytest.mark.usefixtures("quick_compile")

VOCAB = 11
# All are padded to length 5, so each row starts at another index.
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3], [7]]


def make(position="alibi", vocab_size=VOCAB):
    """A tiny model, with random parameters with which it does not repeat one token."""
    config = Model(
        position=position,
        num_layers=1,
        width=16,
        num_heads=4,
        num_kv_heads=2,
        tied_embeddings=False,
    )
    # Room for five tokens and six new ones; the last new token needs no position.
    model = Transformer(config, vocab_size=vocab_size, train_length=10, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(4)
    for leaf in jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    ):
        drawn = np.asarray(leaf[...]) + 0.3 * rng.normal(size=leaf.shape)
        leaf[...] = jnp.asarray(drawn, jnp.float32)
    return model


def next_logits(model, prompts, generated):
    """The logits from which each new token was chosen, computed by one forward pass."""
    texts = [[*prompt, *row[:-1]] for prompt, row in zip(prompts, generated)]
    longest = max(map(len, texts))
    # The padding is on the right, where no token sees it.
    tokens = jnp.array([text + [0] * (longest - len(text)) for text in texts], jnp.int32)
    logits = np.asarray(model.logits(model.hidden_states(tokens)))
    return [row[len(prompt) - 1 : len(text)] for row, prompt, text in zip(logits, prompts, texts)]


def assert_greedy(model, prompts, generated):
    """Asserts that each new token is the likeliest one after a forward pass over all before it."""
    for row, logits in zip(generated, next_logits(model, prompts, generated)):
        np.testing.assert_array_equal(row, logits.argmax(axis=-1))


# Greedy.


def test_prompts_of_many_lengths_compile_once(compiled):
    model = make()
    prefill.clear_cache()
    generate_tokens.clear_cache()
    together = generate(model, PROMPTS, 64)
    assert {len(row) for row in together} == {64}
    assert generate(model, PROMPTS[::-1], 64) == together[::-1]
    assert compiled.count("prefill") == compiled.count("generate_tokens") == 1
    assert_greedy(model, PROMPTS, together)


@pytest.mark.parametrize("position", ["alibi", "fox", "transformer_xl"])
@pytest.mark.sample(1)
def test_the_tokens_are_the_same_under_x64(position):
    model, key = make(position), jax.random.key(0)
    options = [{}, {"temperature": 0.7, "key": key}]
    options += [{"cache_tolerance": 1e-3}] if position == "alibi" else []
    expected = [generate(model, PROMPTS, 6, **option) for option in options]
    with jax.enable_x64(True):
        assert [generate(model, PROMPTS, 6, **option) for option in options] == expected


@pytest.mark.slow
def test_chunks_in_a_cache_are_the_whole_under_x64():
    model, tokens = make(), jnp.array([[3, 1, 4, 1, 5, 9]])
    whole = model.hidden_states(tokens)
    with jax.enable_x64(True):
        cache, parts = model.init_cache(1, 6), []
        for chunk in (tokens[:, :1], tokens[:, 1:3], tokens[:, 3:]):
            part, cache = model.hidden_states_with_cache(chunk, cache)
            parts.append(part)
        assert cache.positions.dtype == cache.segment_ids.dtype == jnp.int32
    np.testing.assert_allclose(jnp.concatenate(parts, axis=1), whole, atol=1e-5)


@pytest.mark.parametrize("position", ["alibi", "fox"])
@pytest.mark.sample(1)
def test_d1_each_prompt_alone_is_its_row_of_the_batch(position):
    model = make(position)
    alone = [generate(model, [prompt], 64)[0] for prompt in PROMPTS]
    assert alone == generate(model, PROMPTS, 64)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.sample(5)
def test_greedy_decoding_equals_forward_passes(position):
    model = make(position)
    generated = generate(model, PROMPTS, 6)
    assert {len(row) for row in generated} == {6}
    assert_greedy(model, PROMPTS, generated)
    assert len({token for row in generated for token in row}) > 2


def test_e6_learned_positions_end():
    """facebookresearch/ParlAI PR#1717. The test of forward passes has one token less."""
    message = "prompt of 5 tokens and 7 new tokens need more than the 10 learned positions"
    with pytest.raises(ValueError, match=message):
        generate(make("learned"), PROMPTS, 7)


def test_bytes_come_back_as_text():
    tokenizer = ByteTokenizer()
    model = make(vocab_size=tokenizer.vocab_size)
    (row,) = generate(model, [tokenizer.encode(b"Fellow")], 6)
    # The separator stands for no byte.
    assert tokenizer.decode(row) == bytes(token for token in row if token != tokenizer.separator)


# Sampled.


# Two of these numbers are 0 in float32.
@pytest.mark.parametrize(
    "options",
    [{"temperature": 1e-30}, {"temperature": 1e-46}, {"temperature": 1.0, "top_p": 1e-46}],
)
def test_draws_from_the_likeliest_token_alone_are_greedy(options):
    model = make()
    drawn = generate(model, PROMPTS, 6, key=jax.random.key(0), **options)
    assert drawn == generate(model, PROMPTS, 6)


def test_draws_do_not_depend_on_the_batch():
    model, keys = make(), jax.random.split(jax.random.key(1), 4)
    options = {"temperature": 1.5, "top_p": 0.9}
    together = generate(model, PROMPTS, 6, key=keys, **options)
    # A single key is split into one key per row.
    assert generate(model, PROMPTS, 6, key=jax.random.key(1), **options) == together
    assert generate(model, PROMPTS, 6, key=jax.random.key(2), **options) != together
    assert generate(model, PROMPTS[::-1], 6, key=keys[::-1], **options) == together[::-1]
    others = [PROMPTS[0], [2, 7], [1, 8, 2, 8], [5]]
    assert generate(model, others, 6, key=keys, **options)[0] == together[0]


def test_draws_follow_the_probabilities():
    model, prompt, temperature = make(), [3, 1, 4], 2.0

    def draw(**options):
        prompts = [prompt] * 2000
        key = jax.random.key(0)
        return np.array(generate(model, prompts, 2, temperature=temperature, key=key, **options)).T

    def shares_of(logits):
        weights = np.exp(np.float64(logits) / temperature)
        return weights / weights.sum()

    def assert_drawn_from(tokens, shares):
        frequencies = np.bincount(tokens, minlength=VOCAB) / len(tokens)
        five_deviations = 5 * np.sqrt(shares * (1 - shares) / len(tokens))
        assert (np.abs(frequencies - shares) <= five_deviations).all()

    first, second = draw()
    common = np.bincount(first).argmax()
    shares, shares_after = map(shares_of, next_logits(model, [prompt], [[common, 0]])[0])
    assert_drawn_from(first, shares)
    # The second draw is independent of the first.
    assert_drawn_from(second[first == common], shares_after)

    # Only the likeliest four are drawn: three of them have less probability than `top_p`.
    *_, third, fourth = np.sort(shares)[::-1][:4].cumsum()
    first, _ = draw(top_p=(third + fourth) / 2)
    kept = shares * (shares >= np.sort(shares)[-4])
    assert set(first.tolist()) == set(np.flatnonzero(kept).tolist())
    assert_drawn_from(first, kept / kept.sum())


def kept_by_oracle(logits, top_p):
    """Holtzman et al. 2020, equation 2; keeps all or none of several equally likely tokens."""
    weights = np.exp(np.float64(logits) - max(logits))
    shares = weights / weights.sum()
    ordered = np.sort(shares)[::-1]
    # On a boundary, rounding decides.
    assume(np.abs(ordered.cumsum()[:-1] - top_p).min() > 1e-5)
    number = next(n for n in range(1, 8) if ordered[:n].sum() >= top_p)
    return shares >= ordered[number - 1]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-20, 20), min_size=7, max_size=7),
    st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
)
def test_the_nucleus_is_the_fewest_tokens_with_enough_probability(quarters, top_p):
    logits = np.array(quarters, np.float32) / 4
    kept = nucleus(jnp.stack([logits, logits[::-1]]), top_p)
    # Kept logits are unchanged, the others cannot be drawn, and rows do not mix.
    wanted = np.ones(7, bool) if top_p == 1 else kept_by_oracle(logits, top_p)
    expected = np.where(wanted, logits, -np.inf)
    np.testing.assert_array_equal(kept, [expected, expected[::-1]])


# Stopping.


def test_a_row_ends_before_its_stop_token():
    model = make()
    whole = generate(model, PROMPTS, 6)
    for stop in range(VOCAB):
        rows = [row[: row.index(stop)] if stop in row else row for row in whole]
        assert generate(model, PROMPTS, 6, stop_token=stop) == rows
    firsts = [row[0] for row in whole]
    assert [] in generate(model, PROMPTS, 6, stop_token=firsts[0])


def test_the_loop_ends_with_the_last_row():
    passes = []

    class Counted(Alibi):
        def bias(self):
            jax.debug.callback(lambda: passes.append(None))
            return super().bias()

    model, prompt = make(), PROMPTS[1]
    # The second row is ahead of the first by one token, so that it stops earlier.
    prompts = [prompt, prompt + generate(model, [prompt], 1)[0]]
    first, second = generate(model, prompts, 6)
    assert first[1:] == second[:5]
    model.positions["alibi"] = Counted(num_heads=4)

    def counted(stop_token):
        passes.clear()
        generate(model, prompts, 6, stop_token=stop_token)
        jax.effects_barrier()
        return len(passes)

    # One pass for the prompts, and one for each new token except the last.
    assert counted(None) == 6
    token = first[2]
    assert first.index(token) == 2
    assert second[1:3] == [token, first[3]]
    assert counted(token) == 3


# Invalid arguments.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, "there is no prompt"),
        ({"prompts": [[1], []]}, "prompt 1 is empty"),
        ({"prompts": [[1], [2, 11]]}, "prompt 1 has token 11, .* vocabulary of 11"),
        ({"prompts": [[-1]]}, "prompt 0 has token -1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0 .* at least 1"),
        ({"temperature": -0.5}, "temperature=-0.5 must be at least 0"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.5}, "top_p=1.5 .* at most 1"),
        ({"temperature": 1.0}, "temperature=1.0 draws at random: give a key"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, "3 keys for 2 prompts"),
    ],
)
def test_invalid_arguments_are_refused(changes, message):
    arguments = {"prompts": [[1, 2], [3]], "max_new_tokens": 2} | changes
    with pytest.raises(ValueError, match=message):
        generate(make(), **arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[1.7, 2.9]]}, "prompt 0"),
        ({"prompts": [np.ones(3)]}, "prompt 0"),
        ({"prompts": [1, 2, 3]}, "prompt 0"),
        ({"prompts": "text"}, "prompt 0"),
        ({"prompts": [[[1], [2]]]}, "prompt 0"),
        ({"prompts": [np.array([], np.int32)]}, "prompt 0 is empty"),
        ({"max_new_tokens": 4.0}, "max_new_tokens=4.0"),
        ({"key": 0}, "key must come from jax.random.key"),
        # An old-style key: its two numbers are not two keys for the two prompts.
        ({"key": jax.random.PRNGKey(0)}, "key must come from jax.random.key"),
    ],
)
def test_arguments_of_other_types_are_refused(changes, message, monkeypatch):
    # Users run the function without the type checks of the tests.
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    arguments = {"prompts": [[1, 2], [3]], "max_new_tokens": 2} | changes
    with pytest.raises(ValueError, match=message):
        generate(make(), **arguments)
