"""Floor 2: attention and sampling, as pure functions of arrays."""
