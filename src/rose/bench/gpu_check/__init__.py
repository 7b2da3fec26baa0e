"""What only a GPU can show, in one run of under ten minutes: ``make gpu-check``, or ``python tools/gpu_check.py``.

Each part is a small class (``part.Part``) that says what it shows and what it needs; ``runner`` runs them and writes what they found
to ``benchmarks/results/gpu-<card>.json``; ``page`` makes docs/gpu.md of these. Nothing here needs the network. The core needs torch,
triton, numpy, attrs, xxhash and zstandard; a part that needs more says so where it is not installed.
"""
