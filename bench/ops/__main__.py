"""Time of an operator, compared with its peers: ``python -m bench.ops OPERATOR [--quick] [--json FILE]``."""

import importlib

from bench.harness import parser
from bench.ops import NAMES

if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("operator", choices=NAMES, metavar="OPERATOR", help=", ".join(NAMES))
    args, options = arguments.parse_known_args()
    module = importlib.import_module(f"bench.ops.{args.operator}")
    module.BENCHMARK.main(module.__doc__, options)
