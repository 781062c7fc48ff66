"""Open-loop load on any server that speaks the OpenAI completions API. Knows nothing of jdserve but HTTP.

One run: a ``Workload`` says how long the prompts and answers are, ``arrivals`` says when each request comes,
``prompts`` cuts prompts of exactly those lengths, ``client`` sends each one at its time and writes down what comes
back, ``metrics`` turns the records into figures and ``report`` shows them. ``bench`` is the command that ties them
together.
"""
