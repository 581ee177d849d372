"""Other ways for the decoder of a translation model to find the positions of its new tokens, which TensorRT may build.

An export counts the real tokens of all, cached ones too, leaves the counts of cached ones out, and gives them the shape of
the ids (`CumSum`, `Slice`, `Reshape`). Each function here writes a part of that otherwise, and `cut` leaves nothing but that
part of the graph.
"""

import copy

import numpy as np
from onnx import helper, numpy_helper

#: The sum of embeddings and positions, where the part ends, and nodes of a graph in front of it.
END, EMBEDDED = "decoder/Add", "decoder/Gather"
SLICE, ROWS, COUNT = "decoder/Slice", "decoder/Gather_1", "decoder/CumSum"
REAL, ONES, COUNTS = "decoder/Cast", "decoder/Where_1", "decoder/Where_2"
IDS_SHAPE, SHAPED = "decoder/Shape", "decoder/Reshape"

WAYS = {}


def way(function):
    WAYS[function.__name__] = function
    return function


def node(kind, inputs, output, **attributes):
    return helper.make_node(kind, inputs, [output], name=output, **attributes)


def constant(graph, name, value):
    graph.initializer.append(numpy_helper.from_array(np.asarray(value, np.int64), name))
    return name


def replace(graph, names, nodes):
    """Puts `nodes` where the last of the nodes called `names` was."""
    places = [place for place, one in enumerate(graph.node) if one.name in names]
    if len(places) != len(names):
        raise ValueError(f"the graph has not all of {', '.join(names)}")
    kept = [one for one in graph.node if one.name not in names]
    at = places[-1] - len(names) + 1
    del graph.node[:]
    graph.node.extend([*kept[:at], *nodes, *kept[at:]])


def inputs_of(graph, name):
    return list(next(one for one in graph.node if one.name == name).input)


@way
def as_exported(graph):
    """Nothing is changed."""


@way
def shape_of_slice(graph):
    """The counts keep the shape in which they were cut off."""
    cut_off = node("Slice", inputs_of(graph, SLICE), SHAPED)
    replace(graph, [SLICE, IDS_SHAPE, SHAPED], [cut_off])


@way
def known_end(graph):
    """The slice ends where the mask does, and not at the largest number that there is."""
    counts, past, _, axis = inputs_of(graph, SLICE)
    nodes = [
        node("Shape", ["attention_mask"], "decoder/mask_shape"),
        node("Gather", ["decoder/mask_shape", axis], "decoder/mask_length", axis=0),
    ]
    replace(graph, [SLICE], [*nodes, node("Slice", [counts, past, "decoder/mask_length", axis], SLICE)])


@way
def picked(graph):
    """Counts are picked by a range of indices."""
    counts, past, _, axis = inputs_of(graph, SLICE)
    one = constant(graph, "decoder/one", 1)
    nodes = [
        node("Shape", ["attention_mask"], "decoder/mask_shape"),
        node("Gather", ["decoder/mask_shape", axis], "decoder/mask_length", axis=0),
        node("Squeeze", [past], "decoder/first"),
        node("Squeeze", ["decoder/mask_length"], "decoder/last"),
        node("Range", ["decoder/first", "decoder/last", one], "decoder/new_places"),
    ]
    replace(graph, [SLICE], [*nodes, node("Gather", [counts, "decoder/new_places"], SLICE, axis=1)])


@way
def new_tokens_alone(graph):
    """New tokens are counted by themselves, behind the number of all real tokens but them."""
    _, past, end, axis = inputs_of(graph, SLICE)
    real, one, zero = inputs_of(graph, ONES)
    axes = constant(graph, "decoder/axes", [1])
    nodes = [
        node("Cast", ["attention_mask"], real, to=9),
        node("Where", [real, one, zero], ONES),
        node("ReduceSum", [ONES, axes], "decoder/all"),
        node("Slice", [ONES, past, end, axis], "decoder/new"),
        node("ReduceSum", ["decoder/new", axes], "decoder/all_new"),
        node("Sub", ["decoder/all", "decoder/all_new"], "decoder/before"),
        node("CumSum", ["decoder/new", one], COUNT),
        node("Add", ["decoder/before", COUNT], "decoder/counted"),
        node("Mul", ["decoder/counted", "decoder/new"], SLICE),
    ]
    replace(graph, [REAL, ONES, COUNT, COUNTS, SLICE], nodes)


@way
def integers_of_32_bits(graph):
    """A mask of ones and zeros is counted as the operators take it."""
    _, past, end, axis = inputs_of(graph, SLICE)
    one = inputs_of(graph, COUNT)[1]
    nodes = [
        node("Cast", ["attention_mask"], REAL, to=6),
        node("CumSum", [REAL, one], COUNT),
        node("Mul", [COUNT, REAL], COUNTS),
        node("Slice", [COUNTS, past, end, axis], SLICE),
    ]
    replace(graph, [REAL, ONES, COUNT, COUNTS, SLICE], nodes)


@way
def rows_cut_off(graph):
    """Positions of all tokens are looked up, and those of cached ones left out."""
    counts, past, end, axis = inputs_of(graph, SLICE)
    table = inputs_of(graph, ROWS)[0]
    looked_up = node("Gather", [table, counts], "decoder/all_rows", axis=0)
    cut_off = node("Slice", ["decoder/all_rows", past, end, axis], ROWS)
    replace(graph, [SLICE, IDS_SHAPE, SHAPED, ROWS], [looked_up, cut_off])


def rewritten(model, name):
    """The model of a decoder with its positions found in this way."""
    model = copy.deepcopy(model)
    WAYS[name](model.graph)
    return model


def cut(model):
    """The part of a decoder that ends with the sum of embeddings and positions."""
    model = copy.deepcopy(model)
    graph, needed, kept = model.graph, {END}, []
    for one in reversed(graph.node):
        if needed.intersection(one.output):
            kept.append(one)
            needed.update(one.input)
    width = next(i.dims[1] for i in graph.initializer if i.name == inputs_of(graph, EMBEDDED)[0])
    inputs = [value for value in graph.input if value.name in needed]
    weights = [value for value in graph.initializer if value.name in needed]
    for field in (graph.node, graph.input, graph.initializer, graph.output, graph.value_info, model.functions):
        del field[:]
    graph.node.extend(reversed(kept))
    graph.input.extend(inputs)
    graph.initializer.extend(weights)
    graph.output.append(helper.make_tensor_value_info(END, 1, ["batch", "sequence", width]))
    return model
