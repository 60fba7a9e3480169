"""Device tensors: the ranks of a device world join, and operations are enqueued behind the tensors' streams."""
