"""The counter of live bytes, which `gradtools.seeing.torch.measures` holds, under its old name."""

from gradtools.seeing.torch.measures import LiveBytes as LiveBytes
from gradtools.seeing.torch.measures import peak_bytes as peak_bytes
