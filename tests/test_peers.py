"""Compares attention weights with those of other libraries' models, with random parameters.

`pip install -e '.[test,peers]'` installs the models. `pytest -m slow tests/test_peers.py` runs
these tests.
"""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from alibi_jax.attention import alibi_attention, attention
from alibi_jax.biases import alibi_bias, alibi_slopes, t5_bias, t5_bias_at

pytestmark = pytest.mark.slow

BATCH, LENGTH, WIDTH, VOCAB = 2, 9, 48, 50
# The mask of a padded batch: the first row is padded on the left, the second is not padded.
PADDED = np.array([[0] * 3 + [1] * (LENGTH - 3), [1] * LENGTH])
HEADS = [1, 2, 3, 4, 6, 8, 12, 16]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def transformers(torch):
    return pytest.importorskip("transformers")


def run(torch, model, attention_layer, projections, mask=None, **inputs):
    """Outputs of an attention layer's named projections, and its attention weights [B, N, T, S]."""
    outputs_by_name = {}

    def keep(name):
        return lambda module, _, output: outputs_by_name.__setitem__(name, output.detach().numpy())

    hooks = [
        getattr(attention_layer, name).register_forward_hook(keep(name)) for name in projections
    ]
    tokens = torch.tensor(np.random.default_rng(0).integers(0, VOCAB, (BATCH, LENGTH)))
    with torch.no_grad():
        outputs = model.eval()(
            input_ids=tokens,
            attention_mask=None if mask is None else torch.tensor(mask),
            output_attentions=True,
            use_cache=False,
            **inputs,
        )
    for hook in hooks:
        hook.remove()
    return [outputs_by_name[name] for name in projections], outputs.attentions[0].numpy()


def weights_of(attend, query, key, **kwargs):
    """The weights [B, N, T, S] of this code's attention: its output for one-hot values."""
    batch, length, heads, _ = key.shape
    one_hot = jnp.broadcast_to(jnp.eye(length)[:, None], (batch, length, heads, length))
    return jnp.moveaxis(attend(jnp.asarray(query), jnp.asarray(key), one_hot, **kwargs), 2, 1)


def assert_same_where_real(ours, theirs, mask=None):
    real = np.ones((BATCH, LENGTH), bool) if mask is None else mask.astype(bool)
    for row in range(BATCH):
        np.testing.assert_allclose(
            np.asarray(ours)[row][:, real[row]], theirs[row][:, real[row]], atol=1e-5
        )


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("heads", HEADS)
def test_bloom_has_the_same_attention_weights(torch, transformers, heads, mask):
    """BLOOM's bias depends on the key only; its positions count tokens without the padding."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        n_head=heads,
        n_layer=1,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    model = transformers.BloomModel(config)
    (fused,), theirs = run(torch, model, model.h[0].self_attention, ["query_key_value"], mask)
    query, key, _ = np.moveaxis(fused.reshape(BATCH, LENGTH, heads, 3, -1), 3, 0)
    segments = None if mask is None else jnp.asarray(mask, jnp.int32)
    ours = weights_of(
        functools.partial(alibi_attention, slopes=alibi_slopes(heads)),
        query,
        key,
        query_segment_ids=segments,
        key_segment_ids=segments,
    )
    assert_same_where_real(ours, theirs, mask)


@pytest.mark.parametrize("heads", HEADS)
def test_mpt_has_the_same_attention_weights(torch, transformers, heads):
    torch.manual_seed(0)
    config = transformers.MptConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        n_heads=heads,
        n_layers=1,
        max_seq_len=32,
        initializer_range=0.5,
    )
    model = transformers.MptModel(config)
    (fused,), theirs = run(torch, model, model.blocks[0].attn, ["Wqkv"])
    query, key, _ = np.moveaxis(fused.reshape(BATCH, LENGTH, 3, heads, -1), 2, 0)
    attend = functools.partial(alibi_attention, slopes=alibi_slopes(heads))
    assert_same_where_real(weights_of(attend, query, key), theirs)


@pytest.mark.parametrize("bias_max", [6, 8, 16])
@pytest.mark.parametrize("heads", HEADS)
def test_mpt_s_bias_max_is_a_power_of_our_slopes(torch, transformers, heads, bias_max):
    """MPT's slopes are powers of 2^(-b/N), b its `alibi_bias_max`, where ours have 2^(-8/N)."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    theirs = build_mpt_alibi_tensor(heads, LENGTH, alibi_bias_max=bias_max).numpy()[:, 0]
    ours = alibi_bias(alibi_slopes(heads) ** (bias_max / 8), 1, LENGTH)[:, 0]
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)


@pytest.mark.parametrize("heads", range(1, 65))
def test_a1_slopes_are_those_of_bloom_and_mpt(torch, transformers, heads):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    ours = np.asarray(alibi_bias(heads, 1, 5, offset=4))[:, 0]
    bloom = build_alibi_tensor(torch.ones(1, 5), heads, torch.float32).numpy()[:, 0]
    # BLOOM's bias depends on the key only: subtract its value at the query's own key.
    np.testing.assert_allclose(bloom - bloom[:, -1:], ours, atol=1e-6)
    mpt = build_mpt_alibi_tensor(heads, 5).numpy()[:, 0]
    np.testing.assert_allclose(mpt, ours, atol=1e-6)


@pytest.mark.parametrize("mask", [None, PADDED], ids=["whole", "padded"])
@pytest.mark.parametrize("multi_query", [False, True])
def test_falcon_s_bias_is_divided_by_the_root_of_the_head_size(
    torch, transformers, multi_query, mask
):
    """tiiuae/falcon-rw adds the bias before it scales the scores, so its slopes are smaller."""
    from transformers.models.falcon.modeling_falcon import build_alibi_tensor

    torch.manual_seed(0)
    heads, size = 8, 6
    config = transformers.FalconConfig(
        vocab_size=VOCAB,
        hidden_size=heads * size,
        num_attention_heads=heads,
        num_hidden_layers=1,
        alibi=True,
        multi_query=multi_query,
        new_decoder_architecture=False,
        initializer_range=0.5,
        attn_implementation="eager",
    )
    layer = transformers.FalconModel(config).h[0].self_attention.eval()
    fused = []
    layer.query_key_value.register_forward_hook(lambda *call: fused.append(call[-1].numpy()))
    # Run the layer only: in some versions the whole model adds the bias to the mask once more.
    real = torch.ones(BATCH, LENGTH, dtype=torch.long) if mask is None else torch.tensor(mask)
    visible = torch.ones(LENGTH, LENGTH).tril().bool() & real.bool()[:, None, None, :]
    with torch.no_grad():
        _, theirs = layer(
            torch.randn(BATCH, LENGTH, heads * size),
            build_alibi_tensor(real, heads, torch.float32),
            torch.where(visible, 0.0, torch.finfo(torch.float32).min),
            output_attentions=True,
        )
    fused, theirs = fused[0], theirs.numpy()
    if multi_query:
        fused = fused.reshape(BATCH, LENGTH, heads + 2, size)
        query, key = fused[:, :, :heads], fused[:, :, heads : heads + 1]
    else:
        query, key, _ = np.moveaxis(fused.reshape(BATCH, LENGTH, heads, 3, size), 3, 0)
    segments = None if mask is None else jnp.asarray(mask, jnp.int32)
    ours = weights_of(
        functools.partial(alibi_attention, slopes=alibi_slopes(heads) / size**0.5),
        query,
        key,
        query_segment_ids=segments,
        key_segment_ids=segments,
    )
    assert_same_where_real(ours, theirs, mask)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_has_the_same_attention_weights(torch, transformers, decoder):
    """T5 does not divide the scores by the square root of the head size."""
    torch.manual_seed(0)
    heads, size = 4, 12
    config = transformers.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=size,
        num_heads=heads,
        num_layers=1,
        d_ff=32,
        initializer_factor=4.0,
        attn_implementation="eager",
    )
    model = transformers.T5Model(config)
    stack = model.decoder if decoder else model.encoder
    layer = stack.block[0].layer[0].SelfAttention
    inputs = {"encoder_hidden_states": torch.ones(BATCH, 3, WIDTH)} if decoder else {}
    (query, key), theirs = run(torch, stack, layer, ["q", "k"], **inputs)
    table = jnp.asarray(layer.relative_attention_bias.weight.detach().numpy())
    query, key = (x.reshape(BATCH, LENGTH, heads, size) for x in (query, key))
    ours = weights_of(
        functools.partial(
            attention,
            bias=functools.partial(t5_bias_at, table, bidirectional=not decoder),
            causal=decoder,
        ),
        query * size**0.5,
        key,
    )
    assert_same_where_real(ours, theirs)
    # Also compare the biases far beyond `max_distance`.
    bias = layer.compute_bias(300, 300).detach().numpy()[0]
    far = np.asarray(t5_bias(table, 300, bidirectional=not decoder))
    np.testing.assert_array_equal(far, bias)
