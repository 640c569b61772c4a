"""WikiText-103 as in the paper: 247M parameters, for the training length after the colon.

python train.py --config=configs/paper/wikitext103.py:512 --config.data.path=path/to/wikitext-103
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
