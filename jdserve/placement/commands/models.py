"""``jdserve models``: the models that are known by name."""

from __future__ import annotations

import argparse

from jdserve.core import jsonio
from jdserve.cost.models import MODELS
from jdserve.placement.commands.hardware import columns

HEAD = ("name", "layers", "hidden", "ffn", "heads", "kv heads", "context", "billion parameters", "KV bytes per token")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.add_argument("--json", action="store_true", help="print the shapes as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the table."""
    if args.json:
        print(jsonio.encode(dict(MODELS)).decode(), end="")
        return 0
    rows = [
        (
            name,
            f"{spec.layers}",
            f"{spec.hidden}",
            f"{spec.ffn}",
            f"{spec.heads}",
            f"{spec.kv_heads}",
            f"{spec.context}",
            f"{spec.parameters / 1e9:.3g}",
            f"{spec.kv_bytes_per_token('bfloat16')}",
        )
        for name, spec in MODELS.items()
    ]
    print(columns([HEAD, *rows]))
    print("\nAny other: the folder or config.json of a checkpoint.")
    return 0
