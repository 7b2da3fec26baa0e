"""``python -m rose_openrlhf``: OpenRLHF's ``train_ppo_ray`` over a pool."""

import sys

from rose_openrlhf.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
