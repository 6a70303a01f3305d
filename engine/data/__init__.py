"""Documents on disk, their preparation from conversations, and micro-batches under a token budget.

Reading order: `shards` (the format), `documents` (opening what people have), `batches` (the order
of training), `chat` and `preparation` (from JSONL to shards). Nothing here needs an engine running.
"""
