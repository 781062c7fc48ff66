"""What a plan costs on devices that are not here: its step programs compiled ahead of time, and what they say."""

from jdserve.aot.comparing import compare
from jdserve.aot.run import dryrun

__all__ = ["compare", "dryrun"]
