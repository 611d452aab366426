"""Planning in parts, where the net is no chain."""

from checkmate_tf import solvers
from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.simulate import keep_all_timeline, structural_floor
from checkmate_tf.solvers.hiremate import HiRemate
from checkmate_tf.solvers.stages import parts_of
from tests import strategies


def net_of_skips(depth):
    """Down `depth` layers and up again, with a skip from each layer down to the one up at its height; then the gradients."""
    builder = GraphBuilder()
    made = [builder.op("x", bytes=4, seconds=1.0)]
    inputs = {}
    for layer in range(depth):
        inputs[len(made)] = made[-1:]
        made.append(builder.op(f"down{layer}", made[-1:], bytes=4, seconds=1.0))
    for layer in range(depth - 1, -1, -1):
        inputs[len(made)] = [made[-1], made[layer]]
        made.append(builder.op(f"up{layer}", inputs[len(made)], bytes=4, seconds=1.0))
    gradients = [builder.op("loss", made[-1:], bytes=4, seconds=1.0)]
    for place in range(len(made) - 1, 0, -1):
        gradients.append(builder.op(f"gradient{place}", [*inputs[place], gradients[-1]], bytes=4, seconds=1.0, backward=True))
    return builder.build()


def test_all_that_others_read_is_the_border_of_a_part():
    graph = net_of_skips(4)
    parts = parts_of(graph, 3)
    forward = [op for part in parts for op in part.forward]
    assert forward == [op.index for op in graph.ops if not op.backward] and len(parts) == 3
    for part in parts:
        inside = {*part.forward, *part.backward}
        read_outside = {value for op in part.forward for value in graph.ops[op].outputs
                        if set(graph.consumers[value]) - inside}
        assert set(part.border) | part.carried == read_outside
    assert sorted(op for part in parts for op in part.backward) == [op.index for op in graph.ops if op.backward]


def test_skips_that_leave_no_chain_are_planned():
    graph = net_of_skips(12)
    floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
    for share in (0.8, 0.5, 0.3):
        solution = solvers.solve(graph, int(floor_bytes + share * (base_bytes - floor_bytes)), HiRemate())
        assert solution.plan is not None and solution.overhead > 0


def test_training_steps_with_everything_in_them():
    found = 0
    for seed in range(6):
        graph = strategies.training_net(seed, 4 + seed)
        floor_bytes, base_bytes = structural_floor(graph)[0], keep_all_timeline(graph).peak_bytes
        budget_bytes = min((floor_bytes + 3 * base_bytes) // 4, base_bytes - 1)
        found += solvers.solve(graph, budget_bytes, HiRemate(), solvers.Limits(seconds=5)).plan is not None
    assert found > 3


def test_where_the_chain_is_one_it_is_not_much_dearer_than_the_exact_programme():
    graph = strategies.linear_net(24)
    budget_bytes = (structural_floor(graph)[0] + keep_all_timeline(graph).peak_bytes) // 2
    in_parts, exact = (solvers.solve(graph, budget_bytes, solver) for solver in (HiRemate(), solvers.get("rotor")))
    assert in_parts.seconds <= 1.15 * exact.seconds
