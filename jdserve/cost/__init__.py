"""What a step, a byte and a device cost: hardware, work, memory, latency models and links. No jax."""
