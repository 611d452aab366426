"""A model as a graph of its layers: the granularity, the sizes and the costs of Checkmate's evaluation.

Jain et al. (MLSys 2020, sections 4.10, 5 and 6) plan at layers. An op is a layer; it makes its output, 4 bytes an element. A loss
of 4 bytes an item follows, then the gradients: the op behind a layer makes a value as large as the layer's output and
reads that output, the outputs of the layers that read it, and their gradients. What stays is twice the weights, for them
and their gradients; the batch itself is not counted (as in the artifact's search for the largest batch). Nothing is traced
or executed, and no memory is needed: sizes come from the shapes that Keras has inferred.

Costs are either multiply-adds, twice as many backward as forward (the paper's section 6.4, figure 6 and table 2), or seconds
by a profile's roofline: the arithmetic or the traffic of the layer, whichever takes longer, both doubled backward.

What this leaves out of a real step, the tracer sees: ops inside of a layer, in-place reuse, scratch, the optimizer.
"""

import math

import keras

from checkmate_tf.ir.errors import UnsupportedError
from checkmate_tf.ir.graph import Graph, GraphBuilder
from checkmate_tf.ir.verify import verify_graph
from checkmate_tf.profiles import Profile

_LOSS_BYTES = 4
_KERNELS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D, keras.layers.Dense, keras.layers.DepthwiseConv1D,
            keras.layers.DepthwiseConv2D)
_TRANSPOSED = (keras.layers.Conv1DTranspose, keras.layers.Conv2DTranspose, keras.layers.Conv3DTranspose)
_ELEMENT_WISE = (keras.layers.Activation, keras.layers.Add, keras.layers.Average, keras.layers.BatchNormalization,
                 keras.layers.LayerNormalization, keras.layers.Maximum, keras.layers.Multiply, keras.layers.ReLU,
                 keras.layers.Softmax, keras.layers.Subtract)


def layer_graph(model: keras.Model, batch_size: int, profile: Profile | None = None) -> Graph:
    """The graph of a functional model's layers for a batch size, forward and backward.

    profile: whose roofline gives the seconds; without, an op's "seconds" are its multiply-adds
    Raises UnsupportedError for a model that is not functional, a layer that is called more than once, an unknown
    dimension beside the batch, or a layer with weights whose arithmetic is not known here.
    """
    if getattr(model, "inputs", None) is None:
        raise UnsupportedError("A graph of layers needs a functional model, whose layers say what they read. "
                               f"Received: {type(model).__name__}")
    layers = [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]
    maker = {id(tensor): layer for layer in layers for tensor in _tensors(layer, "output")}
    given = {id(tensor) for tensor in model.inputs}
    reads = {layer: [_maker(maker, layer.name, tensor) for tensor in _tensors(layer, "input") if id(tensor) not in given]
             for layer in layers}
    builder = GraphBuilder(resident_bytes=2 * sum(4 * math.prod(weight.shape) for weight in model.weights))
    forward, size = {}, {}
    for layer in layers:
        size[layer] = batch_size * sum(_item_bytes(layer, tensor) for tensor in _tensors(layer, "output"))
        forward[layer] = builder.op(layer.name, [forward[other] for other in reads[layer]], bytes=size[layer],
                                    seconds=_cost(layer, batch_size, profile), kind=type(layer).__name__)
    ends = [_maker(maker, "the model's output", tensor) for tensor in model.outputs if id(tensor) not in given]
    loss = builder.op("loss", [forward[layer] for layer in dict.fromkeys(ends)], bytes=_LOSS_BYTES * batch_size, backward=True)
    readers = {layer: [other for other in layers if layer in reads[other]] for layer in layers}
    gradient = {}
    for layer in reversed(layers):
        inputs = [forward[layer], *(forward[other] for other in readers[layer]), *(gradient[other] for other in readers[layer])]
        gradient[layer] = builder.op(f"{layer.name}_backward", [*inputs, *([loss] if layer in ends else [])], bytes=size[layer],
                                     seconds=2 * _cost(layer, batch_size, profile), backward=True, kind=type(layer).__name__)
    return verify_graph(builder.build())


def multiply_adds(layer: keras.layers.Layer) -> int:
    """Multiply-adds of a layer's forward pass for one item; one for each element of an element-wise layer."""
    if isinstance(layer, _KERNELS + _TRANSPOSED):
        tensor, = _tensors(layer, "input" if isinstance(layer, _TRANSPOSED) else "output")
        channel = -1 if layer_is_channels_last(layer) else 1
        positions = _elements(layer, tensor) // tensor.shape[channel]
        return positions * math.prod(layer.kernel.shape)
    if isinstance(layer, _ELEMENT_WISE):
        return sum(_elements(layer, tensor) for tensor in _tensors(layer, "output"))
    if any(len(weight.shape) > 1 for weight in layer.weights):
        raise UnsupportedError("The arithmetic of this layer is not known; trace the model's step instead (tradeoff, plan). "
                               f"Received: layer {layer.name!r} ({type(layer).__name__})")
    return 0


def layer_is_channels_last(layer: keras.layers.Layer) -> bool:
    """Whether channels are the last dimension of what the layer makes."""
    return getattr(layer, "data_format", "channels_last") != "channels_first"


def _cost(layer, batch_size: int, profile: Profile | None) -> float:
    operations = batch_size * multiply_adds(layer)
    if profile is None:
        return float(operations)
    moved = batch_size * sum(_item_bytes(layer, tensor) for end in ("input", "output") for tensor in _tensors(layer, end))
    moved += sum(4 * math.prod(weight.shape) for weight in layer.weights)
    return profile.cost(f"layer {layer.name}", 2.0 * operations, float(moved)).seconds


def _tensors(layer, end: str) -> list:
    return keras.tree.flatten(getattr(layer, end))


def _maker(maker, reader: str, tensor):
    """The layer whose only call made the tensor."""
    if id(tensor) not in maker:
        raise UnsupportedError("In a graph of layers every layer is called once. "
                               f"Received: a layer before {reader!r} that is called more than once")
    return maker[id(tensor)]


def _elements(layer, tensor) -> int:
    if any(size is None for size in tensor.shape[1:]):
        raise UnsupportedError("Every dimension but the batch's must be known. "
                               f"Received: layer {layer.name!r} with shape {tensor.shape}")
    return math.prod(tensor.shape[1:])


def _item_bytes(layer, tensor) -> int:
    return 4 * _elements(layer, tensor)
