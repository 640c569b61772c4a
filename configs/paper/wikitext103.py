"""The paper's 247M-parameter model for WikiText-103. The training length follows the colon.

    python train.py --config=configs/paper/wikitext103.py:512 --config.data.path=path/to/wikitext

The paper trains at the lengths 64, 128, 256, 512, 1024, 1536, 2048 and 3072.
`--config.model.position` selects other position methods. Press et al. 2021, tables 2 to 5, give the
validation perplexity in windows that do not overlap: for ALiBi trained at 512, 19.73 at 512 and
18.40 at 3072. This configuration has not been trained here.

The model is fairseq's transformer_lm_wiki103 with the options of the paper's command. Without the
rows that only pad its tables, it has 246,932,928 parameters. fairseq's model has 246,933,504: its
vocabulary has 9 more entries, for special tokens and padding. The differences from fairseq are:

- Activations are bfloat16 instead of float16.
- The warm-up of the learning rate is one step ahead.
- Batches are windows in an order that is drawn anew in each epoch.
- With `position=sinusoidal`, sines and cosines alternate and positions begin at 0. In fairseq,
  sines fill one half and cosines the other, and positions begin at 2.

Below are parts of two plans, whose times are estimates. The first is for a v4-128, with
`--plan=v4:4x4x4 --config.mesh.data=1 --config.mesh.fsdp=16 --config.mesh.tensor=4`.

    memory of one device (from the compiler, which took 131 s)
      parameters, float32                                    0.015 GiB
      optimizer state, sgd                                   0.015 GiB
      temporary arrays in training                           2.476 GiB
      peak                                                   2.506 GiB
      fits: 8% of the 32 GiB of a TPU v4
    TFLOP of a step on all devices (counted from the configuration)
      matrix products 98.9 (90% of 6 x parameters x tokens), attention 3.72, recomputation 3.02
    ESTIMATE of the time of a step, each part at its peak
      compute 6.0 ms, memory 9.8 ms, network 35.0 ms
      all three at the same time: 35.0 ms, MFU 17%, 0.12 days for 286,000 steps
      one after the other: 50.8 ms, MFU 11%, 0.17 days for 286,000 steps

The second is for a v5e-256, with `--plan=v5e:16x16 --config.mesh.data=8 --config.mesh.fsdp=2
--config.mesh.context=4 --config.mesh.tensor=4`. Each device has only 288 tokens of a step, which is
too few to use 256 devices well.

    memory of one device (from the compiler, which took 148 s)
      parameters, float32                                    0.117 GiB
      optimizer state, sgd                                   0.117 GiB
      temporary arrays in training                           1.024 GiB
      peak                                                   1.259 GiB
      fits: 8% of the 16 GiB of a TPU v5e
    ESTIMATE of the time of a step, each part at its peak
      compute 2.1 ms, memory 4.8 ms, network 22.0 ms
      all three at the same time: 22.0 ms, MFU 9%, 0.07 days for 286,000 steps
      one after the other: 28.9 ms, MFU 7%, 0.10 days for 286,000 steps

The matrix products are only 90% of 6 x parameters x tokens, because that formula counts the tables
of rare words for every token, although few tokens use them.
"""

from alibi_jax.config import Config, ConfigError

# Each of 8 GPUs has as many whole windows as fit into this number of tokens.
TOKENS, GPUS = 9216, 8


def get_config(length: str = "512") -> Config:
    if not length.isdecimal() or not 1 <= int(length) <= TOKENS:
        raise ConfigError(f"{length!r} is no training length: give 1 to {TOKENS} tokens, as :512")
    config = Config()
    config.data.dataset = "wikitext"
    config.data.path = "wikitext-103"
    config.data.tokenizer = "words"
    # The size of WikiText-103's vocabulary, with the end-of-line token. Only plans use this number.
    config.data.vocab_size = 267_735
    config.model.position = "alibi"
    config.model.num_layers = 16
    config.model.width = 1024
    config.model.num_heads = 8
    config.model.ff_width = 4096
    config.model.activation = "relu"
    config.model.norm_epsilon = 1e-5
    config.model.final_norm = False
    config.model.use_bias = True
    config.model.initialization = "fairseq"
    config.model.adaptive_cutoffs = "20000,60000"
    config.model.adaptive_factor = 4
    config.model.dropout = 0.3
    config.model.attention_dropout = 0.1
    config.model.activation_dropout = 0.1
    config.model.adaptive_dropout = 0.2
    config.model.dtype = "bfloat16"
    config.optimizer.name = "sgd"
    config.optimizer.momentum = 0.99
    config.optimizer.weight_decay = 0.0
    config.optimizer.learning_rate = 1.0
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 16_000
    config.optimizer.final_fraction = 1e-4
    config.optimizer.clip_norm = 0.1
    config.train.length = int(length)
    config.train.batch_size = TOKENS // int(length) * GPUS
    config.train.steps = 286_000
    config.train.seed = 1
    config.train.log_every = 100
    config.train.validation_every = 2_000
    config.train.validation_targets = 0
    config.checkpoint.every = 2_000
    return config
