"""The bar for a figure of which a page or a test makes a claim; a benchmark prints both and never fails."""


def compare_with_bar(measured: float, *, at_least: float | None = None, at_most: float | None = None) -> str:
    """The bar, and whether this figure is within it: "(bar: at least 20, met)"."""
    words = []
    for word, bar, met in (
        ("at least", at_least, at_least is None or measured >= at_least),
        ("at most", at_most, at_most is None or measured <= at_most),
    ):
        if bar is not None:
            words.append(f"{word} {bar:g}, {'met' if met else 'MISSED'}")
    return f"(bar: {'; '.join(words)})"
