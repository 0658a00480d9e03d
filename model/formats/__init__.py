"""Weight formats: how a linear layer's weights are stored, in memory and in files."""
