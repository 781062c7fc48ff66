"""Floor 2: how logical axes lie on a mesh."""
