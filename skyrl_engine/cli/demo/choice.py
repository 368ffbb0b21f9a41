"""The demos by name."""

from skyrl_engine.cli.demo.recipe import Recipe


def recipe(name: str) -> Recipe:
    """The demo of this name; a demo's module is imported when it is chosen."""
    if name == "tiny":
        from skyrl_engine.cli.demo.tiny import TinyRecipe

        return TinyRecipe()
    from skyrl_engine.cli.demo.smollm2 import SmolLM2Recipe

    return SmolLM2Recipe()
