"""The counter of live bytes, which `gradtools.torch.measures` holds, under its old name."""

from gradtools.torch.measures import LiveBytes as LiveBytes
from gradtools.torch.measures import peak_bytes as peak_bytes
