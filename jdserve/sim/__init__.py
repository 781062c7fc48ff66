"""Floor 3 of the model tower: the event loop that drives ``policy/`` on a virtual clock, workloads, traces. No jax."""
