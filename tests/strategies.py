"""Random graphs for Hypothesis, with every feature a graph can have, and the same as a plain function of a seed."""

import random

from hypothesis import strategies as st

from checkmate_tf.ir.graph import Graph, GraphBuilder
from checkmate_tf.ir.verify import verify_graph


def graphs(min_ops: int = 0, max_ops: int = 10) -> st.SearchStrategy[Graph]:
    """Valid graphs: multi-output ops and ops without outputs, scratch, once, control edges, overwrites, reuses, results,
    zero bytes and costs, several components, a backward part or none."""
    return st.builds(lambda size, choices: draw_graph(size, choices),
                     st.integers(min_ops, max_ops), st.randoms(use_true_random=False))


def random_graph(seed: int, max_ops: int = 7, min_ops: int = 1) -> Graph:
    """The same without Hypothesis: one graph per seed."""
    choices = random.Random(seed)
    return draw_graph(choices.randint(min_ops, max_ops), choices)


def draw_graph(size: int, choices: random.Random) -> Graph:
    """A graph of `size` ops whose features are drawn from `choices`."""
    builder = GraphBuilder(resident_bytes=choices.choice([0, 0, 3]))
    backward_from = choices.randint(0, size) if choices.random() < 0.5 else size
    values: list[int] = []
    value_bytes: list[int] = []
    last_reader: dict[int, int] = {}
    overwritten: set[int] = set()
    for index in range(size):
        readable = [value for value in values if value not in overwritten]
        inputs = choices.sample(readable, min(len(readable), choices.choice([0, 1, 1, 1, 2, 2, 3])))
        overwrites: list[int] = []
        if readable and choices.random() < 0.1:
            overwrites = [choices.choice(readable)]
            overwritten.update(overwrites)
        ports = choices.choice([1, 1, 1, 1, 1, 0, 2, 3])
        sizes = [choices.choice([0, 1, 1, 2, 3, 5]) for _ in range(ports)]
        seconds = float(choices.choice([0, 1, 1, 2, 3, 7]))
        scratch_bytes = choices.choice([0, 0, 0, 0, 2])
        after = choices.sample(range(index), choices.randint(0, 1)) if index and choices.random() < 0.2 else ()
        name = f"op{index}"
        reuses = []
        if ports == 1 and inputs and choices.random() < 0.4:
            reuses = choices.sample(inputs, choices.randint(1, len(inputs)))
            sizes = [value_bytes[reuses[0]]]
            reuses = [value for value in reuses if value_bytes[value] == sizes[0]]
        elif ports > 1 and inputs and sum(size == value_bytes[inputs[0]] for size in sizes) == 1:
            reuses = [value for value in inputs if value_bytes[value] == value_bytes[inputs[0]]]
        builder.op(name, inputs, bytes=sizes, seconds=seconds, scratch_bytes=scratch_bytes, after=after,
                   once="a stateful draw" if overwrites or choices.random() < 0.1 else None,
                   overwrites=overwrites, backward=index >= backward_from, reuses=reuses)
        for value in inputs:
            last_reader[value] = index
        values.extend(builder.outputs_of(name))
        value_bytes.extend(sizes)
    results = choices.sample(values, min(len(values), choices.choice([0, 0, 1, 2])))
    return verify_graph(builder.build(results))


def linear_net(layers: int, *, bytes: int = 1, seconds: float = 1.0) -> Graph:
    """A linear net, its loss and its gradients, with Checkmate's edges: 2 * layers + 1 ops.

    Ops 0 .. layers - 1 are the layers and op `layers` is the loss. Then come the gradients, the last layer's first:
    each reads its layer's output, the output of what follows that layer, and the gradient of that if there is one.
    """
    builder = GraphBuilder()
    outputs: list[int] = []
    for layer in range(layers):
        outputs.append(builder.op(f"layer{layer}", outputs[-1:], bytes=bytes, seconds=seconds))
    outputs.append(builder.op("loss", outputs[-1:], bytes=bytes, seconds=seconds))
    gradient: list[int] = []
    for layer in range(layers - 1, -1, -1):
        inputs = [outputs[layer], outputs[layer + 1], *gradient]
        gradient = [builder.op(f"gradient{layer}", inputs, bytes=bytes, seconds=seconds, backward=True)]
    return verify_graph(builder.build())


def interleaved_chains(chains: int, length: int) -> Graph:
    """Chains of ops in an order that goes along all of them at once, then summed up: 3 values are enough, one chain after
    the other, but the given order holds one of each."""
    builder = GraphBuilder()
    ends: list[list[int]] = [[] for _ in range(chains)]
    for place in range(length):
        for chain in range(chains):
            ends[chain] = [builder.op(f"chain{chain}_{place}", ends[chain], bytes=1, seconds=1.0)]
    total = ends[0]
    for chain in range(1, chains):
        total = [builder.op(f"sum{chain}", [*total, *ends[chain]], bytes=1, seconds=1.0)]
    return verify_graph(builder.build())


def training_net(seed: int, layers: int = 4) -> Graph:
    """A net with all that its training step may hold: weights that are read, then overwritten by an update at the end;
    dropout masks drawn once; skips over one layer; scratch; ops with two outputs; the loss as a result."""
    choices = random.Random(seed)
    builder = GraphBuilder(resident_bytes=choices.choice([0, 4]))

    def make(name, inputs, **options):
        builder.op(name, list(dict.fromkeys(inputs)), bytes=[choices.randint(1, 4), *options.pop("more", ())],
                   seconds=float(choices.randint(1, 4)), scratch_bytes=choices.choice([0, 0, 1]), **options)
        return builder.outputs_of(name)[0]

    outputs = [make("stem", [])]
    weights, masks = [], []
    for layer in range(layers):
        weights.append(make(f"weight{layer}", []))
        inputs = [outputs[-1], weights[-1]]
        masks.append(make(f"mask{layer}", [], once="a random draw") if choices.random() < 0.3 else None)
        inputs += [masks[-1]] if masks[-1] is not None else []
        inputs += [outputs[-2]] if layer and choices.random() < 0.3 else []
        outputs.append(make(f"layer{layer}", inputs, more=[choices.randint(0, 2)] if choices.random() < 0.3 else []))
    loss = make("loss", [outputs[-1]])
    gradient, updates = make("gradient", [loss, outputs[-1]], backward=True), []
    for layer in range(layers - 1, -1, -1):
        updates.append((layer, make(f"weight{layer}_gradient", [outputs[layer], gradient], backward=True)))
        inputs = [outputs[layer + 1], weights[layer], gradient, *([masks[layer]] if masks[layer] is not None else [])]
        gradient = make(f"gradient{layer}", inputs, backward=True)
    for layer, weight_gradient in updates:
        make(f"update{layer}", [weight_gradient, weights[layer]], overwrites=[weights[layer]], once="a write",
             backward=True)
    return verify_graph(builder.build([loss]))
