"""Let a module compute with a function of its parameters while it runs."""

from collections.abc import Callable

from torch import Tensor, nn

View = Callable[[Tensor], Tensor]


def view_parameters(module: nn.Module, view: View) -> None:
    """In every forward pass, let `module` compute with `view(parameter)` in the place of each of its own parameters.

    When a module runs, FSDP has put gathered parameters in place and reads names and gradients from them; they stay registered, and state
    dicts do not change. A gradient hook on a sharded parameter would run too late, after the sum over ranks.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def hide(_module: nn.Module, _inputs: object) -> None:
        for name in names:
            # an instance attribute is found before the parameter that nn.Module registers
            vars(module)[name] = view(getattr(module, name))

    def show(_module: nn.Module, _inputs: object, _output: object) -> None:
        for name in names:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)
