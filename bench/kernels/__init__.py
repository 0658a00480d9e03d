"""Every kernel beside its peers: `inputs` and what they must give, `peers`, the table of `cases`, and the `driver`."""
