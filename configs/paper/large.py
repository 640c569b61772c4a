"""The paper's 1.3B-parameter model. The training length follows the colon.

python train.py --config=configs/paper/large.py:1024 --config.data.path=path/to/texts
"""

from alibi_jax.config import Config, ConfigError

# Tokens per update.
TOKENS = 2_097_152


def get_config(length: str = "1024") -> Config:
    if not length.isdecimal() or not int(length) or TOKENS % int(length):
        raise ConfigError(
            f"{length!r} is no training length that divides {TOKENS}: give one such as :1024"
        )
    config = Config()
    config.data.dataset = "text"
    config.data.path = "texts"
    config.data.tokenizer = "bpe"
    config.data.vocab_size = 50_257
    config.model.position = "alibi"
    config.model.num_layers = 25
    config.model.width = 2048
    config.model.num_heads = 16
    config.model.ff_width = 8192
    config.model.activation = "relu"
    config.model.use_bias = True
    config.model.dtype = "bfloat16"
    config.model.remat = "full"
    config.optimizer.name = "adamw"
    config.optimizer.learning_rate = 2e-4
    config.optimizer.warmup_steps = 1_500
    config.optimizer.weight_decay = 0.01
    config.train.length = int(length)
    config.train.batch_size = TOKENS // int(length)
    config.train.steps = 50_000
    config.train.log_every = 20
    config.train.validation_every = 1_000
    config.train.validation_targets = 0
    config.checkpoint.every = 500
    return config
