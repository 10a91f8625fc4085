"""The counter of live bytes, which `gradtools.torch.seeing.measures` holds, under its old name."""

from gradtools.torch.seeing.measures import LiveBytes as LiveBytes
from gradtools.torch.seeing.measures import peak_bytes as peak_bytes
