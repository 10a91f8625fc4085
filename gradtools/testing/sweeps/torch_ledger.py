"""What the PyTorch sweep knows not to agree, and why: kinks, limits, defects of PyTorch."""

from gradtools.testing.sweeps import LEFT_OUT, Known

LEDGER: tuple[Known, ...] = (
    Known("*", "every way", LEFT_OUT, "there is nothing to differentiate", whole=True),
)
