"""``python -m jdserve.server``: serve a plan over HTTP."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from jdserve.core.backends import Attention
from jdserve.core.logs import LOG_FORMATS
from jdserve.core.shipped import plans
from jdserve.server.config import add_argument as add_config
from jdserve.server.config import expanded

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def default_plan() -> Path:
    """The plan that is served when none is named."""
    return plans() / "quickstart.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the server."""
    add = parser.add_argument
    add_config(parser)
    add("--plan", type=Path, default=None, help="plan.json to serve (default: one prefill and one decode instance)")
    add(
        "--model",
        help="overrides the plan's model: a name that is known (smollm2-135m-instruct, gemma-3-270m), a Hugging Face"
        " folder, a .gguf file, a folder of `jdserve convert`, or an id of the Hugging Face hub (owner/name)",
    )
    add("--weights", choices=("int8",), help="how matrices are stored; overrides the plan's (default: in its dtype)")
    add(
        "--model-plugin",
        metavar="MODULE:CLASS",
        help="class from outside jdserve that computes the model; every worker must be able to import it",
    )
    add("--attention", choices=get_args(Attention), help="back end of attention; overrides the plan's (default: auto)")
    add("--max-model-len", type=_positive, help="most tokens (prompt and output) of one request; overrides the plan's")
    add(
        "--max-num-seqs",
        type=_positive,
        help="largest batch of each decode or colocated instance; overrides the plan's",
    )
    add(
        "--block-size",
        type=_positive,
        help="tokens per page of KV; overrides the plan's, pools keep their number of pages",
    )
    add("--dtype", choices=("float32", "bfloat16"), help="of weights, activations and KV; overrides the plan's")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_port, default=8000, help="port to listen on, 0 for a free one (default: %(default)s)")
    add("--served-model-name", help="what clients call the model (default: its own name)")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="key that clients must send (may be repeated); other users of this machine can read it here, so prefer a"
        " file",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="file of keys that `jdserve key` made")
    add("--admin-routes", action="store_true", help="let an admin's key drain and add instances over HTTP")
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web origin whose pages may use the server, such as https://chat.example (may be repeated; default: none)",
    )
    add("--chat-template", type=Path, help="file with a jinja chat template that replaces the model's")
    add("--drain-timeout", type=_seconds, default=30.0, help="seconds that a shutdown waits for open requests")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="info has a line per request (default: %(default)s)")
    add("--log-format", choices=LOG_FORMATS, default="text", help="json writes one object a line (default: text)")
    add(
        "--request-log",
        type=Path,
        metavar="FILE",
        help="keep a .jsonl of the requests, for `jdserve replan --from-log`",
    )
    add("--otlp-endpoint", metavar="URL", help="send traces there by OTLP over HTTP; needs the extra otel")
    add("--record", type=Path, help="folder for the event log of each scheduler, for `jdserve replay`")
    add("--in-process", action="store_true", help="run all instances in this process instead of workers")
    add("--oversubscribe", action="store_true", help="let workers share CPU cores: none is pinned")
    add(
        "--control",
        type=_address,
        default=("127.0.0.1", 0),
        metavar="HOST:PORT",
        help="where workers of other hosts join; needs --secret-file (default: this host only)",
    )
    add("--secret-file", type=Path, help="file with the secret (16 characters or more) that joining workers share")
    add("--join-timeout", type=_seconds, default=60.0, help="seconds to wait for workers of other hosts")
    add("--heartbeat-timeout", type=_seconds, default=10.0, help="seconds of silence after which a worker is dead")


def _port(text: str) -> int:
    value = int(text) if text.isdecimal() else -1
    if not 0 <= value <= 65535:
        raise argparse.ArgumentTypeError(f"a port is between 0 and 65535, got {text!r}")
    return value


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:
        raise argparse.ArgumentTypeError(f"HOST:PORT is wanted, got {text!r}")
    return host, _port(port)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"at least 1, got {text!r}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"at least 0 seconds, got {text!r}")
    return value


def run(args: argparse.Namespace) -> int:
    """Serve what parsed arguments ask for; returns the exit code."""
    from jdserve.server.serve import Options, serve

    return serve(
        Options(
            plan=args.plan or default_plan(),
            model=args.model,
            weights=args.weights,
            model_plugin=args.model_plugin,
            attention=args.attention,
            host=args.host,
            port=args.port,
            served_name=args.served_model_name,
            api_keys=tuple(args.api_key),
            api_key_file=args.api_key_file,
            admin_routes=args.admin_routes,
            allow_origins=tuple(args.allow_origin),
            chat_template=args.chat_template,
            drain_timeout_s=args.drain_timeout,
            log_level=args.log_level,
            log_format=args.log_format,
            request_log=args.request_log,
            otlp_endpoint=args.otlp_endpoint,
            record=args.record,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            block_size=args.block_size,
            dtype=args.dtype,
            in_process=args.in_process,
            oversubscribe=args.oversubscribe,
            control=args.control,
            secret_file=args.secret_file,
            join_timeout_s=args.join_timeout,
            heartbeat_timeout_s=args.heartbeat_timeout,
        )
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m jdserve.server", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(expanded(parser, sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    sys.exit(main())
