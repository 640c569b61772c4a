"""The default: shows the paper's effect on real text in a few minutes on two cores.

    python train.py && python eval.py --workdir=runs/tiny

The expected validation perplexity per byte is 4.541 at length 128, 4.479 at 512 and 4.461 at 4096.
On two cores of an Intel Xeon training took 80 to 104 s and the evaluation 120 s.
"""

from alibi_jax.config import Config


def get_config() -> Config:
    config = Config()
    config.data.dataset = "sotu"
    config.data.tokenizer = "bytes"
    config.model.position = "alibi"
    config.model.num_layers = 2
    config.model.width = 128
    config.model.num_heads = 8
    config.train.length = 128
    config.train.batch_size = 32
    # Micro-batches fit a core's cache. Without accumulation a step takes 1.4 times as long.
    config.train.accumulation = 4
    config.train.steps = 600
    config.optimizer.learning_rate = 3e-3
    return config
