"""One process that gives memory to a Mooncake Store until it is ended. Started by test_mooncake_faults.py."""

from __future__ import annotations

import sys

from rose.backends.mooncake import MooncakeTransport


def main() -> None:
    transport = MooncakeTransport(master=sys.argv[1], segment_bytes=int(sys.argv[2]))
    sys.stdout.write(f"{transport.segment}\n")
    sys.stdout.flush()
    sys.stdin.read()  # until the test lets go
    transport.close()


if __name__ == "__main__":
    main()
