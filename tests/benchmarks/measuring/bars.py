"""The bar for a figure of which a page or a test makes a claim; a benchmark prints both and never fails."""


def beside(measured: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """The bar, and whether this figure is within it: "(bar: at least 20, met)"."""
    told = []
    for word, bar, met in (
        ("at least", at_least, at_least is None or measured >= at_least),
        ("at most", at_most, at_most is None or measured <= at_most),
    ):
        if bar is not None:
            told.append(f"{word} {bar:g}, {'met' if met else 'MISSED'}")
    return f"(bar: {'; '.join(told)})"
