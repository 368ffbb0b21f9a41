"""The demos by name."""

from skyrl_engine.cli.demo.recipe import DemoRecipe


def recipe(name: str) -> DemoRecipe:
    """Return the demo of this name; its module is imported only now."""
    if name == "tiny":
        from skyrl_engine.cli.demo.tiny import TinyRecipe

        return TinyRecipe()
    from skyrl_engine.cli.demo.smollm2 import SmolLM2Recipe

    return SmolLM2Recipe()
