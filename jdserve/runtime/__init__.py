"""Floor 4: instances that run, and the engine that the front door talks to."""
