"""``lenvm serve``: flags of the server in :mod:`lenvm_kernels.serving`."""

from __future__ import annotations

import argparse
import os
from typing import Any

from lenvm_kernels.loading import arguments


def add(commands: Any) -> None:
    """Add the subcommand to ``lenvm``."""
    parser = commands.add_parser(
        "serve",
        help="serve values over HTTP",
        description="Serve value logits at /encode and /tree_value, with the API of the LenVM authors' SGLang fork, "
        "and predicted lengths of prompts' outputs at /predict. SIGTERM ends it.",
    )
    parser.set_defaults(run=run_command)
    parser.add_argument("value_model", metavar="VALUE", help=arguments.A_MODEL)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30010, metavar="N", help="port to listen on (default: %(default)s)")
    key_help = "key that requests must contain (default: the variable LENVM_API_KEY, which other users cannot see)"
    parser.add_argument("--api-key", default=os.environ.get("LENVM_API_KEY"), metavar="KEY", help=key_help)
    arguments.add_numbers(parser, max_tokens_in_cache=(32_768, "number of tokens in the cache of keys and values"))
    parser.add_argument("--gamma", type=float, help="gamma of the value model (default: from its lenvm_config.json)")
    arguments.add_device(parser)
    arguments.add_dtype(parser, "the value model")


def run_command(args: argparse.Namespace) -> None:
    """Load the value model and serve until a signal."""
    with arguments.usage_errors():
        if args.api_key == "":
            raise ValueError("--api-key and LENVM_API_KEY must not be empty; leave them out to accept every request")
        import torch

        from lenvm_kernels.loading.models import load_value_model
        from lenvm_kernels.serving import ValueEngine, create_app

        options = dict(device=arguments.device_of(args.device), dtype=getattr(torch, args.dtype), gamma=args.gamma)
        value_model, tokenizer = load_value_model(args.value_model, **options)
        engine = ValueEngine(value_model, max_tokens=args.max_tokens_in_cache)
    import uvicorn

    app = create_app(engine, tokenizer=tokenizer, api_key=args.api_key)
    uvicorn.run(app, host=args.host, port=args.port, access_log=False, timeout_graceful_shutdown=60)
