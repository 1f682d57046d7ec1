"""`python -m lowbit.cli`, for where the script is not on the PATH; nothing else."""

import sys

from lowbit.cli import main

sys.exit(main())
