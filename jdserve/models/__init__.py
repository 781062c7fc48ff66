"""Models as Flax NNX modules, and the checkpoints that fill them."""
