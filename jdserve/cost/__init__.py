"""Floor 2 of the model tower: what a step costs, from a model's shape, the hardware and measured profiles. No jax."""
