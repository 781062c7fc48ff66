"""Floor 5: the HTTP front. It speaks the OpenAI API to clients and :class:`TextEngine` to the engine."""
