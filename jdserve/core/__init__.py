"""Floor 0: the nouns that both towers share. No jax, no numpy, no thread, no clock, no socket."""
