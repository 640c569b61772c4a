"""A small but serious run, for one GPU or for an hour on two CPU cores.

    python train.py --config=configs/sotu.py && python eval.py --workdir=runs/sotu

It trains on 16.4 million tokens, which are one and a half epochs. Two cores of an Intel Xeon reach
5,200 tokens/s, so the run takes 53 minutes. It has not been run to its end yet, so there is no
expected perplexity.
"""

from alibi_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.data.dataset = "sotu"
    config.data.tokenizer = "bytes"
    config.model.position = "alibi"
    config.model.num_layers = 4
    config.model.width = 256
    config.model.num_heads = 8
    config.train.length = 256
    config.train.batch_size = 32
    config.train.accumulation = 4
    config.train.steps = 2000
    config.train.validation_every = 250
    config.optimizer.learning_rate = 2e-3
    config.optimizer.warmup_steps = 100
    config.checkpoint.every = 100
    return config
