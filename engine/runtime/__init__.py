"""The scheduler graph: stages on worker threads and streams, knowing nothing of what they compute.

Reading order: `graph` (what runs where), `inbox` (who may run ahead, and how far), `parcel` and
`lane` (tensors between threads and streams), `serializer` (what must not meet), `timing`,
`scheduler`. Locks, events and streams are made here alone; the work itself is handed in.
"""
