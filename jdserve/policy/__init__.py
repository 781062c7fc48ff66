"""Floor 1: every scheduling decision, as state machines.

Each machine has one method, ``handle(event, now) -> list[Command]``, with ``now`` in integer nanoseconds. It knows no
jax, thread, clock, socket or random source, so the simulator and the server run the very same decisions: the simulator
posts each command's completion on a heap, the runtime posts the command to an executor.
"""
