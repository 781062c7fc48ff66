"""Floor 4 of the model tower: the search for the placement with the highest goodput per device. No jax."""
