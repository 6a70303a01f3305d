"""The scheduler graph: stages on worker threads and streams, knowing nothing of what they compute.

Reading order: `graph` (what runs where), `inbox` (who may run ahead, and how far), `parcel`, `lane` and
`pinned_ring` (tensors between threads and streams), `timing`, `scheduler`, `failure`. What must not meet
is `serializer`'s, with `autotuner` and `tensor_cache` below it; `tuning_cache` keeps what was tuned. Locks,
events and streams are made here alone; the work itself is handed in.
"""
