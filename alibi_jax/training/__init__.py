"""Training: the step, the loop, optimizers, metrics, throughput and profiler traces."""
