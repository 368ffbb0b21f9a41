"""Parameters of a model that is made without values, from its configuration alone."""

import torch
from attrs import evolve

from skyrl_engine.contracts.values.model import ModelConfig
from skyrl_engine.model_facts.parameter_shapes import ParameterShape, Place
from skyrl_engine.modeling.causal_lm import output_names, transformer_layers
from skyrl_engine.modeling.four_bit import list_four_bit_layers
from skyrl_engine.modeling.loading import load_skeleton
from skyrl_engine.modeling.vision import language_part


def list_parameter_shapes(model: ModelConfig) -> list[ParameterShape]:
    """Return the parameters that a rank has of a model, adapters and a value head included, a tied head a second time.

    The model is made without values; no file of weights is read. Raises ModelError for a configuration that cannot be used.
    """
    with torch.random.fork_rng(devices=()):
        whole, scorer = load_skeleton(evolve(model, compile=False), images=True)
    embedding, layers = whole.get_input_embeddings().weight, transformer_layers(language_part(scorer.decoder))
    numbers = {id(parameter): number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    heads, seen = output_names(whole), set()
    shapes = []
    place: Place = "before"
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        own: Place
        if (number := numbers.get(id(parameter))) is not None:
            own, place = "layer", "after"
        else:
            own = "head" if name in heads else "embedding" if parameter is embedding else place
        is_seen = id(parameter) in seen
        if is_seen and own != "head":
            continue
        seen.add(id(parameter))
        columns = parameter.shape[-1] if parameter.ndim else 1
        shapes.append(
            ParameterShape(
                name,
                own,
                rows=parameter.numel() // max(columns, 1),
                columns=columns,
                layer=number or 0,
                is_matrix=parameter.ndim >= 2,
                is_trained=parameter.requires_grad,
                is_tied=is_seen,
            )
        )
    of_modules = {id(module): number for number, layer in enumerate(layers) for module in layer.modules()}
    for name, layer in list_four_bit_layers(whole):
        shapes.append(
            ParameterShape(
                f"{name}.weight",
                "layer",
                rows=layer.out_features,
                columns=layer.in_features,
                layer=of_modules.get(id(layer), 0),
                is_trained=False,
                held_bytes=sum(buffer.nbytes for buffer in layer.buffers()),
            )
        )
    return shapes
