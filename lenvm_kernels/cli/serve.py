"""``lenvm serve``: its flags, and the server of :mod:`lenvm_kernels.serving`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lenvm_kernels.loading import arguments


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "serve",
        help="answer with values over HTTP",
        description="Answer /encode and /tree_value with value logits, in the forms of the fork of SGLang of LenVM's "
        "authors, and /predict with the predicted lengths of prompts' outputs. SIGTERM ends it.",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("value_model", metavar="VALUE", help=arguments.A_MODEL)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30010, metavar="N", help="port to listen at (default: %(default)s)")
    key_help = "refuse requests without it (default: the variable LENVM_API_KEY, which other users do not see)"
    parser.add_argument("--api-key", default=os.environ.get("LENVM_API_KEY"), metavar="KEY", help=key_help)
    arguments.add_numbers(parser, max_tokens_in_cache=(32_768, "tokens whose keys and values are kept, in all"))
    parser.add_argument("--gamma", type=float, help="gamma of the value model (default: from its lenvm_config.json)")
    arguments.add_device(parser)
    arguments.add_dtype(parser, "the value model")


def run_command(args: argparse.Namespace) -> None:
    """Load the value model and answer until a signal ends the server."""
    with arguments.usage_errors():
        if args.api_key == "":
            raise ValueError("--api-key and LENVM_API_KEY must not be empty; leave them out to accept every request")
        import torch

        from lenvm_kernels.loading.models import load_value_model
        from lenvm_kernels.serving import ValueEngine, create_app

        device = arguments.device_of(args.device)
        value_model, tokenizer = load_value_model(
            args.value_model, device=device, dtype=getattr(torch, args.dtype), gamma=args.gamma
        )
        engine = ValueEngine(value_model, max_tokens=args.max_tokens_in_cache)
    import uvicorn

    app = create_app(engine, tokenizer=tokenizer, api_key=args.api_key)
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, timeout_graceful_shutdown=60)
