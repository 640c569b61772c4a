"""Eight simulated CPU devices, set before anything asks JAX for its devices."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
