"""The division of a model's layers into the pieces of a pipeline, for those that build them and for those that count their bytes."""


def divide_layers(layers: int, pieces: int) -> tuple[int, ...]:
    """Return the number of layers of each of `pieces` pieces, which differ by one at most.

    Where they differ, the pieces in the middle have one more first, then the first, which also holds the embedding, and never the last, which
    also computes the head.
    """
    least, more = divmod(layers, pieces)
    filled = [*range(1, pieces - 1), 0][:more]
    return tuple(least + (piece in filled) for piece in range(pieces))


def place_layers(layers: int, pieces: int) -> tuple[int, ...]:
    """Return the piece that holds each layer."""
    return tuple(piece for piece, count in enumerate(divide_layers(layers, pieces)) for _ in range(count))
