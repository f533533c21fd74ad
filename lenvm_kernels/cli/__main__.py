import sys

from lenvm_kernels.cli import main

sys.exit(main())
