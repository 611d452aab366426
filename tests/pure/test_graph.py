import dataclasses

from hypothesis import given

from checkmate_tf.ir.graph import GraphBuilder
from checkmate_tf.ir.verify import verify_graph
from tests import strategies


def two_readers():
    builder = GraphBuilder(resident_bytes=5)
    source = builder.op("source", bytes=[2, 3], seconds=1.0)
    left = builder.op("left", [source, source], bytes=1, seconds=2.0)
    right = builder.op("right", [source, source + 1, left], bytes=1, seconds=4.0)
    builder.op("write", [right], bytes=[], overwrites=[source], once="writes a variable")
    return builder.build([right])


def test_inputs_are_listed_once_however_often_they_are_given():
    assert two_readers().ops[1].inputs == (0,)


def test_consumers_are_the_ops_that_read_a_value():
    assert two_readers().consumers == ((1, 2), (2,), (2,), (3,))


def test_writers_are_the_ops_that_overwrite_a_value():
    assert two_readers().writers == ((3,), (), (), ())


def test_predecessors_are_listed_once_for_several_values_of_one_op():
    assert two_readers().predecessors == ((), (0,), (0, 1), (2,))


def test_a_graphs_seconds_are_those_of_running_every_op_once():
    assert two_readers().seconds == 7.0


def test_builder_finds_ops_and_their_values_by_name():
    builder = GraphBuilder()
    builder.op("a", bytes=[1, 2])
    builder.op("nothing", bytes=[])
    assert builder.outputs_of("a") == (0, 1)
    assert builder.outputs_of("nothing") == ()
    assert builder.index_of("nothing") == 1


def test_key_ignores_prices_and_nothing_else():
    graph = two_readers()
    priced = dataclasses.replace(graph, ops=tuple(dataclasses.replace(op, seconds=9.0, scratch_bytes=7)
                                                  for op in graph.ops))
    assert priced.key == graph.key
    bigger = dataclasses.replace(graph, values=(dataclasses.replace(graph.values[0], bytes=99), *graph.values[1:]))
    other_results = dataclasses.replace(graph, results=())
    renamed = dataclasses.replace(graph, ops=(dataclasses.replace(graph.ops[0], name="s"), *graph.ops[1:]))
    assert len({graph.key, bigger.key, other_results.key, renamed.key}) == 4


@given(strategies.graphs())
def test_random_graphs_keep_the_invariants_and_their_key(graph):
    assert verify_graph(graph).key == dataclasses.replace(graph).key
