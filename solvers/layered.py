"""Random layered graphs as instances, of any size: what planners are measured with where no network is large enough.

    python -m checkmate_tf.solvers.layered --ops 10000 --seed 0 --output layered.json

Ops stand in layers of random width. Each reads one to three ops of the layer before and, now and then, one of any earlier
layer; every op is read by somebody, but for the last layer's. Costs and bytes are whole numbers, uniform between 1 and
100 and between 1 and 1,000. After Gagrani et al., "Neural topological ordering for computation graphs", NeurIPS 2022,
whose graphs these resemble in shape; their numbers are not reproduced.
"""

import argparse
import json
import pathlib
import random
import sys
from collections.abc import Sequence
from typing import Any

_SKIP = 0.1  # ops that also read from an earlier layer


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m checkmate_tf.solvers.layered",
                                     description="Writes a random layered graph as an instance.")
    parser.add_argument("--ops", type=int, required=True)
    parser.add_argument("--width", type=int, default=20, help="most ops in a layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=pathlib.Path, required=True)
    options = parser.parse_args(arguments)
    if options.ops < 1 or options.width < 1:
        parser.error(f"--ops and --width must be positive. Received: {options.ops} and {options.width}")
    options.output.write_text(json.dumps(layered_instance(options.ops, options.width, options.seed)))
    return 0


def layered_instance(ops: int, width: int = 20, seed: int = 0) -> dict[str, Any]:
    """An instance of so many ops in layers of at most `width`; the same for the same seed."""
    choices = random.Random(seed)
    layers: list[list[int]] = []
    while (made := sum(map(len, layers))) < ops:
        layers.append(list(range(made, min(ops, made + choices.randint(1, width)))))
    edges: set[tuple[int, int]] = set()
    for before, layer in zip(layers, layers[1:]):
        for op in layer:
            edges.update((u, op) for u in choices.sample(before, min(len(before), choices.randint(1, 3))))
            if choices.random() < _SKIP:
                edges.add((choices.randrange(before[-1] + 1), op))
        read = {u for u, _ in edges}
        edges.update((u, choices.choice(layer)) for u in before if u not in read)
    entries = [{"name": f"op{op}", "cost": choices.randint(1, 100), "bytes": choices.randint(1, 1000), "backward": False}
               for op in range(ops)]
    return {"name": f"layered_n{ops}_s{seed}", "source": "checkmate_tf.solvers.layered", "ops": entries,
            "edges": sorted(edges)}


if __name__ == "__main__":
    sys.exit(main())
