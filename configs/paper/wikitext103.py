"""WikiText-103 as in the paper, for the training length after the colon: 247M parameters.

    python train.py --config=configs/paper/wikitext103.py:512 --config.data.path=path/to/wikitext

Lengths of the paper: 64, 128, 256, 512, 1024, 1536, 2048, 3072; the other methods with
`--config.model.position`. Press et al. 2021, tables 2 to 5, validation perplexity in windows that
do not overlap, ALiBi trained at 512: 19.73 at 512, 18.40 at 3072. It has not been trained here.

The model is fairseq's transformer_lm_wiki103 with the paper's command. Without rows that only fill
tables up it has 246,932,928 parameters; fairseq's, of 9 words more, which stand for nothing, has
246,933,504. What differs: activations are bfloat16, not float16; the learning rate warms up a step
earlier; batches are windows in an order drawn anew each epoch; the sinusoids of
`position=sinusoidal` alternate and begin at position 0, fairseq's are in halves and begin at 2.

Planned, an estimate for each, with `--plan=v4:4x4x4 --config.mesh.data=1 --config.mesh.fsdp=16
--config.mesh.tensor=4`, a v4-128; the best of seven meshes that `--plan=v4:4x4x4,search` tried:

    memory of one device (compiled for it in 131 s)
      parameters, float32                                    0.015 GiB
      optimizer state, sgd                                   0.015 GiB
      temporaries in training                                2.476 GiB
      all together, at most                                  2.506 GiB
      fits: 8% of the 32 GiB of a TPU v4
    a step on all devices (counted from the configuration)
      products 98.9 TFLOP (90% of 6 x parameters x tokens), attention 3.72, computed again 3.02
    ESTIMATE of a step, each part at its peak
      products 6.0 ms, memory 9.8 ms, network 35.0 ms
      all at the same time: 35.0 ms, MFU 17%, 0.12 days for 286,000 steps
      one after the other: 50.8 ms, MFU 11%, 0.17 days for 286,000 steps

and with `--plan=v5e:16x16 --config.mesh.data=8 --config.mesh.fsdp=2 --config.mesh.context=4
--config.mesh.tensor=4`, where each device has but 288 tokens of a step: too few for so many.

    memory of one device (compiled for it in 148 s)
      parameters, float32                                    0.117 GiB
      optimizer state, sgd                                   0.117 GiB
      temporaries in training                                1.024 GiB
      all together, at most                                  1.259 GiB
      fits: 8% of the 16 GiB of a TPU v5e
    ESTIMATE of a step, each part at its peak
      products 2.1 ms, memory 4.8 ms, network 22.0 ms
      all at the same time: 22.0 ms, MFU 9%, 0.07 days for 286,000 steps
      one after the other: 28.9 ms, MFU 7%, 0.10 days for 286,000 steps

(6 x parameters x tokens counts the tables of rare words for every token, which few tokens use.)
"""

from alibi_jax.config import Config, ConfigError

# As many whole windows as have at most so many tokens, on each of 8 GPUs.
TOKENS, GPUS = 9216, 8


def get_config(length: str = "512") -> Config:
    if not length.isdecimal() or not 1 <= int(length) <= TOKENS:
        raise ConfigError(f"{length!r} is no training length: give 1 to {TOKENS} tokens, as :512")
    config = Config()
    config.data.dataset = "wikitext"
    config.data.path = "wikitext-103"
    config.data.tokenizer = "words"
    # Its words with the end of a line, for plans.
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
