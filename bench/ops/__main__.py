"""Time of an operator, compared with its peers: ``python -m bench.ops OPERATOR [--quick] [--json FILE]``."""

from bench.harness import parser
from bench.ops import operators

if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("operator", choices=operators(), metavar="OPERATOR", help=", ".join(operators()))
    args, options = arguments.parse_known_args()
    module = operators()[args.operator]
    module.BENCHMARK.main(module.__doc__, options)
