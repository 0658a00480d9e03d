"""Every kernel beside its peers: what a `case` is, `families` of shapes and peers, the table of `cases`, `timing`."""
