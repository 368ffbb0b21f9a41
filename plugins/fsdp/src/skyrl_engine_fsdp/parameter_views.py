"""Parameters that a module sees through a function while it runs."""

from collections.abc import Callable

from torch import Tensor, nn

View = Callable[[Tensor], Tensor]


def view_parameters(module: nn.Module, view: View) -> None:
    """In every forward pass, let `module` compute with `view` of its own parameters in their places.

    FSDP has put gathered parameters in place when a module runs, and takes its own names and gradients from those: they stay what they are,
    and so do state dicts. A gradient hook of a sharded parameter would come after the sum over ranks, and too late.
    """
    names = [name for name, _ in module.named_parameters(recurse=False)]

    def hide(_module: nn.Module, _inputs: object) -> None:
        for name in names:
            vars(module)[name] = view(getattr(module, name))  # found before what nn.Module registers

    def show(_module: nn.Module, _inputs: object, _output: object) -> None:
        for name in names:
            vars(module).pop(name, None)

    module.register_forward_pre_hook(hide)
    module.register_forward_hook(show, always_call=True)
