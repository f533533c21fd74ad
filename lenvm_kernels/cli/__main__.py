import sys

from lenvm_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
