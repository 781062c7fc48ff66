"""Floor 3: moving the KV of a request from the mesh that computed it to the mesh that decodes it, by pull."""
